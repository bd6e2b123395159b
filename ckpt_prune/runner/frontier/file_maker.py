"""Files of a frontier: how each candidate is made and measured, and what the best one leaves behind."""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.checkpoint.staging import Staging, write_atomically
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.graph_types import GGUF_FILES, GgufType
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.evaluation.fewer_tokens import TokenParts
from ckpt_prune.gguf.choosing import TypeBudget, TypeChoice
from ckpt_prune.gguf.embedding_score import TextEmbeddings
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.score import TextPredictions
from ckpt_prune.gguf.timing import FileTimes, time_file
from ckpt_prune.gguf.types import NO_OTHERS
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.options.data import ProofOptions, words_of_windows
from ckpt_prune.options.option import words_of_options
from ckpt_prune.recipe.sizes import Timed
from ckpt_prune.runner.column_budgets import recipe_of
from ckpt_prune.runner.file_budgets import FileBudgets, export_of
from ckpt_prune.runner.frontier.asked import as_named_in
from ckpt_prune.runner.frontier.candidates import LOST_ENERGY, FileCandidate, Measured, MeasuredFile
from ckpt_prune.runner.frontier.pruning import prune_by
from ckpt_prune.runner.frontier.record import FILE, MADE, PRUNED, RECIPE, Frontier, write_pages
from ckpt_prune.runner.vocabularies import parts_of_tokens
from ckpt_prune.show.model_card import CARD, described_by_card, front_matter, lines_of_search, source_card

MIXTURES: tuple[GgufType, ...] = (
    *("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_nl", "iq4_xs"),
    *("q3_k_m", "q3_k_s", "iq3_s", "iq3_xxs", "q2_k", "iq2_s"),
)
"""llama.cpp's own mixtures that are in question."""
DATA = ("choose", "bos", "compute_dtype")
"""Options of the samples, beside their number and length, that other commands have, too."""
MADE_FILE = f"{MADE}.gguf"


def candidate_of(name: str, choice: TypeChoice, *, feedback: bool = False) -> FileCandidate:
    """Return the candidate that a budget has chosen."""
    columns, types = tuple(choice.columns.values()), choice.words()
    how = choice.chosen, choice.others, choice.bytes, choice.kl, columns, types, feedback
    return FileCandidate(name, *how, choice.by_pruning, choice.rows)


@dataclass(frozen=True)
class Maker:
    """Makes candidates in a staging folder.

    Attributes:
        options: of the command.
        budgets: of the dense model's file.
        reference: its predictions, or its embeddings if it has no head.
        staging: where files and pruned models are made, and what is done is noted.
        timed: the work that files are timed on, if a time is asked for.
    """

    options: FrontierOptions
    budgets: FileBudgets
    reference: TextPredictions | TextEmbeddings
    staging: Staging
    timed: Timed | None = None

    @property
    def samples(self) -> Samples:
        return self.budgets.samples

    @property
    def budget(self) -> TypeBudget:
        return self.budgets.types

    @cached_property
    def mixtures(self) -> list[FileCandidate]:
        """All of llama.cpp's own."""
        return [self.mixture(name) for name in MIXTURES]

    def mixture(self, name: GgufType) -> FileCandidate:
        """Return one of llama.cpp's own mixtures, by the importance of inputs."""
        plan, kl = self.budget.of_mixture(name)
        return FileCandidate(name, name, NO_OTHERS, plan.bytes, kl, types=f"llama.cpp's {name}")

    def mixture_within(self, limit: float, loss: float, times: FileTimes | None = None) -> Iterator[FileCandidate]:
        """Yield the best of llama.cpp's own mixtures within a size, or within a time in nanoseconds if given `times`.

        There is none if none is predicted to lose at most `loss` nats.
        """

        def cost(each: FileCandidate) -> float:
            return each.bytes if times is None else self.budget.time(self.budget.plan(each.chosen).kinds, times)

        fitting = [each for each in self.mixtures if (each.kl or 0) <= loss and cost(each) <= limit]
        if fitting:
            yield min(fitting, key=lambda each: each.kl or 0)

    def smallest_mixture(self, loss: float) -> Iterator[FileCandidate]:
        """Yield the smallest of llama.cpp's own mixtures that is predicted to lose at most `loss` nats, if any is."""
        fitting = [each for each in self.mixtures if (each.kl or 0) <= loss]
        if fitting:
            yield min(fitting, key=lambda each: each.bytes)

    def recipe(self, candidate: FileCandidate, *, export: bool) -> dict[str, Any]:
        """Return the recipe that prunes as a candidate, and with `export` also writes its file."""
        score = self.budgets.columns.score if candidate.columns else "obs"
        file = export_of(candidate.chosen, candidate.others) if export else None
        return recipe_of(candidate.columns, self.budgets.vocabularies.kept_rows(candidate.rows), score, file)

    def _model(self, candidate: FileCandidate) -> Model:
        """Return the model of a candidate, pruned unless that is done."""
        if not candidate.prunes:
            return self.budgets.model
        digest = hashlib.sha256(json.dumps([candidate.columns, candidate.rows]).encode()).hexdigest()[:12]
        place = self.staging.scratch / f"{PRUNED}-{digest}"
        out = place / PRUNED  # a file says the name of the folder
        prune_by(self.recipe(candidate, export=False), self.options, self.samples, out)
        return open_model(str(out), Opening(True))

    def place(self, candidate: FileCandidate) -> Path:
        return self.staging.scratch / f"{candidate.name.replace(' ', '-').replace(',', '')}.gguf"

    def make(self, candidate: FileCandidate) -> Path:
        """Make a candidate's file, unless it is there."""
        place, model = self.place(candidate), self._model(candidate)
        if not place.is_file():
            with show_progress(candidate.feedback):  # others are made at once
                how: dict[str, Any] = {"statistics": self.budgets.statistics}
                if candidate.feedback:
                    samples = self.samples
                    if candidate.rows is not None:  # other tokens
                        samples = choose_samples(model, self.options, most=len(samples), say=Notices())
                    how = {"live": LiveSamples(samples, 1, self.budgets.compute_dtype), "feedback": True}
                export_gguf(
                    str(model.checkpoint.path),
                    place,
                    ProofOptions(),
                    kind=candidate.chosen,
                    others=candidate.others,
                    proof=False,
                    trust=self.options.trust_remote_code or candidate.prunes,
                    **how,
                )
        return place

    def _foresee(self, candidate: FileCandidate, parts: TokenParts | None, say: Notices) -> FileCandidate:
        """Return a pruned candidate with what that has lost, measured, in place of what it was predicted to lose.

        The prediction is of second order, and of one block at a time: it is low where many columns go. What rounding
        adds needs no such correction.
        """
        folder = self._model(candidate).checkpoint.whole
        lost = self.reference.diverge(folder, parts)
        kl = (candidate.kl or 0) - candidate.by_pruning + lost
        of = "KL" if self.budgets.model.family.gives_logits else LOST_ENERGY
        say(f"predicted of the file: {of} {kl:.3f}, of it {lost:.3f} by what was pruned, which is measured")
        return replace(candidate, kl=kl, by_pruning=lost)

    def _parts(self, candidate: FileCandidate) -> TokenParts | None:
        """Return how a candidate with fewer tokens writes a token; None if it has all."""
        kept = self.budgets.vocabularies.kept_rows(candidate.rows)
        return None if kept is None else parts_of_tokens(self.budgets.model, kept)

    def measure(self, candidate: FileCandidate, keep: MeasuredFile | None, say: Notices) -> MeasuredFile:
        """Make a candidate and measure it, unless an earlier run has; leave its file, and that of the best so far."""
        notes = self.staging.journal.notes
        if candidate.name in notes:
            return Measured.read(FileCandidate, notes[candidate.name])
        say(f"making and measuring: {candidate.name}")
        parts = self._parts(candidate)
        if candidate.prunes:
            candidate = self._foresee(candidate, parts, say)
        kept = {self.place(candidate), *([] if keep is None else [self.place(keep.candidate)])}
        for file in set(self.staging.scratch.glob("*.gguf")) - kept:
            file.unlink()
        file = self.make(candidate)
        score = self.reference.score(file, parts)
        if self.timed is not None:
            score = replace(score, ms=time_file(file, self.timed, self.budgets.model.tokens) / 1e6)
        measured = Measured(candidate, score)
        self.staging.journal.record(candidate.name, note=measured.note())
        return measured


def commands_of(options: FrontierOptions, candidate: FileCandidate, maker: Maker) -> list[str]:
    """Return the commands that make a candidate again, in the folder of the search."""
    options = as_named_in(options.output, options)
    data = words_of_windows(options.text, len(maker.samples), maker.samples.tokens, options.seed)
    trust = ["--trust-remote-code"] if options.trust_remote_code else []
    data += words_of_options(options, DATA)
    model, types = str(options.model), candidate.others.options
    if candidate.prunes:  # the recipe says all
        found = [["prune", model, *trust, "--recipe", RECIPE, *data, "--evaluate-samples", "0", "-o", PRUNED]]
    elif candidate.feedback:
        quantize = ["quantize", model, "--format", "gguf", "--type", candidate.chosen, *types, *data]
        found = [[*quantize, "--evaluate-samples", "0", "-o", MADE_FILE]]
    else:
        export = ["export", model, *trust, "--format", "gguf", "--dtype", candidate.chosen, *types]
        found = [
            ["calibrate", model, *trust, *data, "--collect", "moments,linears", "-o", "statistics"],
            [*export, "--statistics", "statistics", "-o", MADE_FILE],
        ]
    made = GGUF_FILES[candidate.others.name_file(candidate.chosen)]
    moved = [f"mv {PRUNED}/{made} {MADE_FILE}"] if candidate.prunes else []
    return [*(shlex.join(["ckpt-prune", *words]) for words in found), *moved]


def make_frontier(
    options: FrontierOptions,
    maker: Maker,
    found: Sequence[MeasuredFile],
    best: MeasuredFile | None,
    asked: str,
    beyond_use: str,
    reach: int | None,
) -> Frontier:
    """Return the record of what was found."""
    reference, names = maker.reference, ", ".join(path.name for path in options.held_out)
    data = "{} windows of {} tokens of {}".format(*reference.windows.shape, names)
    how: dict[str, Any] = {}
    if isinstance(reference, TextEmbeddings):
        of = f"embeddings of {plural(len(reference.short), 'text')} cut from" if reference.short else "hidden states of"
        data, how = f"the {of} {data}", {"loss": LOST_ENERGY, "agreement": "cosine"}
    return Frontier(
        folder=options.output,
        place=str(as_named_in(options.output, options).model),
        model=model_name(maker.budgets.model.checkpoint.path),
        dense=reference.perplexity,
        dense_bytes=maker.budgets.model.checkpoint.nbytes,
        found=found,
        best=best,
        asked=asked,
        beyond_use=beyond_use,
        reach=reach,
        commands=[] if best is None else commands_of(options, best.candidate, maker),
        data_words=data,
        windows=len(reference.windows),
        **how,
    )


def write_frontier(frontier: Frontier, folder: Path, maker: Maker, best: MeasuredFile | None) -> None:
    """Write record, page, picture, commands and the best file into a folder."""
    files = list[str]()
    if best is not None:
        candidate = best.candidate
        files.append(FILE)
        maker.make(candidate).rename(folder / FILE)
        if candidate.prunes:
            files.append(RECIPE)
            write_atomically(folder / RECIPE, yaml.safe_dump(maker.recipe(candidate, export=True), sort_keys=False))
        files.append(CARD)
    write_pages(frontier, folder, files)
    if best is not None:
        write_atomically(folder / CARD, _card(folder, maker.budgets.model))


def _card(folder: Path, model: Model) -> str:
    """Return README.md of a folder that holds a file, and the record of the search that found it."""
    source, generates = model.checkpoint, model.family.gives_logits
    architecture = open_gguf(folder / FILE).values["general.architecture"]
    base = {"base_model": source.name, "base_model_relation": "quantized"} if "/" in source.name else {}
    described = described_by_card(source_card(source.path), "AutoModelForCausalLM" if generates else "AutoModel")
    lines = [
        front_matter({"library_name": "gguf", **base, **described, "tags": ["ckpt-prune", "gguf"]}),
        f"# {as_markdown(source.name)}, GGUF",
        "",
        f"For llama.cpp, and what is built on it, as architecture {as_code(str(architecture))}:",
        "",
        "```sh",
        f"{'llama-cli' if generates else 'llama-embedding'} -m {FILE}",
        "```",
        "",
        *lines_of_search(folder),
        "",
    ]
    return "\n".join(lines)
