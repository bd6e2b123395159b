"""Candidates of a frontier: what each would be, and how it is made and measured."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.gguf.choosing import TypeBudget, TypeChoice
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.score import FileScore, TextPredictions, TokenParts, diverge_from, score_file
from ckpt_prune.gguf.types import NO_OTHERS
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions, PruneOptions
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.runner.file_budgets import FileBudgets, export_of, recipe_of
from ckpt_prune.runner.prune import prune_model
from ckpt_prune.runner.read_recipe import read_recipe
from ckpt_prune.runner.vocabularies import parts_of_tokens

MIXTURES: tuple[GgufType, ...] = (
    *("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_nl", "iq4_xs"),
    *("q3_k_m", "q3_k_s", "iq3_s", "iq3_xxs", "q2_k", "iq2_s"),
)
"""llama.cpp's own mixtures that are in question."""
DATA = ("choose", "bos", "compute_dtype")
"""Options of the samples, beside their number and length, that other commands have, too."""
PRUNED = "pruned"
"""Folder of a model with fewer columns."""


@dataclass(frozen=True)
class Candidate:
    """A file that may be made.

    Attributes:
        name: in words.
        chosen, others: types of its matrices.
        bytes: of the file, to the byte.
        kl: what it is predicted to lose, nats a token; None if that is not known.
        by_pruning: part of it that fewer columns and tokens add; once they are gone, what was measured of that.
        columns: that the MLP of each block keeps; empty: all.
        types: in words.
        feedback: matrices are also rounded by error feedback, behind those that are rounded.
        rows: tokens that stay; None: all.
    """

    name: str
    chosen: GgufType
    others: OtherTypes
    bytes: int
    kl: float | None
    columns: tuple[int, ...] = ()
    types: str = ""
    feedback: bool = False
    by_pruning: float = 0.0
    rows: int | None = None

    @property
    def kinds(self) -> dict[str, Any]:
        """Types of matrices, as JSON has them."""
        return {"file": self.chosen} | {name: each for name, each in asdict(self.others).items() if each}

    @property
    def prunes(self) -> bool:
        return bool(self.columns) or self.rows is not None

    @classmethod
    def of_types(cls, name: str, choice: TypeChoice, *, feedback: bool = False) -> "Candidate":
        columns, types = tuple(choice.columns.values()), choice.words()
        how = choice.chosen, choice.others, choice.bytes, choice.kl, columns, types, feedback
        return cls(name, *how, choice.by_pruning, choice.rows)


@dataclass(frozen=True)
class Measured:
    """A candidate, and what it is worth."""

    candidate: Candidate
    score: FileScore

    def line(self, dense: float) -> str:
        score, predicted = self.score, self.candidate.kl
        foreseen = "" if predicted is None else f" (predicted {predicted:.3f})"
        return (
            f"{self.candidate.name}: {score.bytes / 1e6:.2f} MB, KL {score.kl:.3f}{foreseen}, perplexity "
            f"{score.perplexity or 0:.2f} (dense {dense:.2f})"
        )

    def note(self) -> dict[str, Any]:
        return {"candidate": asdict(self.candidate), "score": asdict(self.score)}

    @classmethod
    def read(cls, note: dict[str, Any]) -> "Measured":
        own, score = dict(note["candidate"]), dict(note["score"])
        own |= {"others": OtherTypes(**own["others"]), "columns": tuple(own["columns"])}
        score["speeds"] = tuple(score["speeds"])
        return cls(Candidate(**own), FileScore(**score))


@dataclass(frozen=True)
class Maker:
    """Makes candidates in a staging folder.

    Attributes:
        options: of the command.
        budgets: of the dense model's file.
        reference: its predictions.
        staging: where files and pruned models are made, and what is done is noted.
    """

    options: FrontierOptions
    budgets: FileBudgets
    reference: TextPredictions
    staging: Staging

    @property
    def samples(self) -> Samples:
        return self.budgets.samples

    @property
    def budget(self) -> TypeBudget:
        return self.budgets.types

    @cached_property
    def _mixtures(self) -> list[Candidate]:
        return [self.mixture(name) for name in MIXTURES]

    def mixture(self, name: GgufType) -> Candidate:
        """Return one of llama.cpp's own mixtures, by the importance of inputs."""
        plan, kl = self.budget.of_mixture(name)
        return Candidate(name, name, NO_OTHERS, plan.bytes, kl, types=f"llama.cpp's {name}")

    def mixture_within(self, limit: int, loss: float) -> Iterator[Candidate]:
        """Yield the best of llama.cpp's own mixtures within a size, if it is predicted to lose at most `loss` nats."""
        fitting = [each for each in self._mixtures if each.bytes <= limit and (each.kl or 0) <= loss]
        if fitting:
            yield min(fitting, key=lambda each: each.kl or 0)

    def smallest_mixture(self, loss: float) -> Iterator[Candidate]:
        """Yield the smallest of llama.cpp's own mixtures that is predicted to lose at most `loss` nats, if any is."""
        fitting = [each for each in self._mixtures if (each.kl or 0) <= loss]
        if fitting:
            yield min(fitting, key=lambda each: each.bytes)

    def recipe(self, candidate: Candidate, *, export: bool) -> dict[str, Any]:
        """Return the recipe that prunes as a candidate, and with `export` also writes its file."""
        score = self.budgets.score if candidate.columns else "obs"
        file = export_of(candidate.chosen, candidate.others) if export else None
        return recipe_of(self.budgets.model, candidate.columns, self.budgets.kept_rows(candidate.rows), score, file)

    def prune_options(self) -> dict[str, Any]:
        """Return the options of `prune` that make a candidate by its recipe."""
        return {
            "model": self.options.model,
            "text": self.options.text,
            "samples": len(self.samples),
            "window": self.samples.tokens,
            "seed": self.options.seed,
            "evaluate_samples": 0,
            **{name: getattr(self.options, name) for name in (*DATA, "device", "trust_remote_code")},
            "progress": self.options.progress,
        }

    def _model(self, candidate: Candidate) -> Model:
        """Return the model of a candidate, pruned unless that is done."""
        if not candidate.prunes:
            return self.budgets.model
        digest = hashlib.sha256(json.dumps([candidate.columns, candidate.rows]).encode()).hexdigest()[:12]
        place = self.staging.scratch / f"{PRUNED}-{digest}"
        out, recipe = place / PRUNED, place / "recipe.yaml"  # a file says the name of the folder
        if not out.is_dir():
            place.mkdir(exist_ok=True)
            recipe.write_text(yaml.safe_dump(self.recipe(candidate, export=False), sort_keys=False))
            resume = out.with_name(f"{out.name}.partial").exists()
            given = {"recipe": str(recipe), "output": str(out), "resume": resume}
            options = check_options(PruneOptions, self.prune_options() | given)
            prune_model(options, read_recipe(options))
        return open_model(str(out), Opening(True))

    def place(self, candidate: Candidate) -> Path:
        return self.staging.scratch / f"{candidate.name.replace(' ', '-').replace(',', '')}.gguf"

    def make(self, candidate: Candidate) -> Path:
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

    def _foresee(self, candidate: Candidate, parts: TokenParts | None, say: Notices) -> Candidate:
        """Return a pruned candidate with what that has lost, measured, in place of what it was predicted to lose.

        The prediction is of second order, and of one block at a time: it is low where many columns go. What rounding
        adds needs no such correction.
        """
        folder = self._model(candidate).checkpoint.whole
        lost = diverge_from(self.reference, folder, parts)
        kl = (candidate.kl or 0) - candidate.by_pruning + lost
        say(f"pruned, KL {lost:.3f} (predicted {candidate.by_pruning:.3f}); as a file {kl:.3f} is predicted")
        return replace(candidate, kl=kl, by_pruning=lost)

    def _parts(self, candidate: Candidate) -> TokenParts | None:
        """Return how a candidate with fewer tokens writes a token; None if it has all."""
        kept = self.budgets.kept_rows(candidate.rows)
        return None if kept is None else parts_of_tokens(self.budgets.model, kept)

    def measure(self, candidate: Candidate, keep: Measured | None, say: Notices) -> Measured:
        """Make a candidate and measure it, unless an earlier run has; leave its file, and that of the best so far."""
        notes = self.staging.journal.notes
        if candidate.name in notes:
            return Measured.read(notes[candidate.name])
        say(f"making and measuring: {candidate.name}")
        parts = self._parts(candidate)
        if candidate.prunes:
            candidate = self._foresee(candidate, parts, say)
        kept = {self.place(candidate), *([] if keep is None else [self.place(keep.candidate)])}
        for file in set(self.staging.scratch.glob("*.gguf")) - kept:
            file.unlink()
        measured = Measured(candidate, score_file(self.make(candidate), self.reference, parts))
        self.staging.journal.record(candidate.name, note=measured.note())
        return measured
