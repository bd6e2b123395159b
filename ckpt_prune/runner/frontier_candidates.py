"""Candidates of a frontier: what each would be, and how it is made and measured."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.common.progress import show_progress
from ckpt_prune.gguf.choosing import TypeBudget, TypeChoice
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.importance import importance_of_statistics
from ckpt_prune.gguf.losses import predict_type_losses
from ckpt_prune.gguf.score import FileScore, Reference, score_file
from ckpt_prune.gguf.types import NO_OTHERS
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.fisher import LIMITS
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions, PruneOptions
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.runner.prune import prune_model
from ckpt_prune.runner.read_recipe import read_recipe

MIXTURES: tuple[GgufType, ...] = (
    *("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_nl", "iq4_xs"),
    *("q3_k_m", "q3_k_s", "iq3_s", "iq3_xxs", "q2_k", "iq2_s"),
)
"""llama.cpp's own mixtures that are in question."""
UNIFORM: tuple[Literal["q8_0", "q5_0", "q4_1", "iq4_nl"], ...] = ("q8_0", "q5_0", "q4_1", "iq4_nl")
"""Types that all matrices have at once, the embedding included."""
STEPS = 6
"""The columns of an MLP go in steps of about one part of so many."""
MOST_COLUMNS = 3
"""An MLP keeps more than one part of so many of its columns."""


@dataclass(frozen=True)
class Candidate:
    """A file that may be made.

    Attributes:
        name: in words.
        chosen, others: types of its matrices.
        bytes: of the file, to the byte.
        kl: what it is predicted to lose, nats a token; None if that is not known.
        width: columns that each MLP keeps; None: all.
        types: in words.
        feedback: matrices are also rounded by error feedback, behind those that are rounded.
    """

    name: str
    chosen: GgufType
    others: OtherTypes
    bytes: int
    kl: float | None
    width: int | None = None
    types: str = ""
    feedback: bool = False

    @classmethod
    def of_types(cls, name: str, choice: TypeChoice) -> "Candidate":
        return cls(name, choice.chosen, choice.others, choice.bytes, choice.kl, types=choice.words())


@dataclass(frozen=True)
class Measured:
    """A candidate, and what it is worth."""

    candidate: Candidate
    score: FileScore

    def line(self, dense: float) -> str:
        score, predicted = self.score, self.candidate.kl
        foreseen = "" if predicted is None else f" (predicted {predicted:.3f})"
        return (
            f"{self.candidate.name}: {human_bytes(score.bytes)}, KL {score.kl:.3f}{foreseen}, perplexity "
            f"{score.perplexity:.2f} (dense {dense:.2f})"
        )

    def note(self) -> dict[str, Any]:
        return {"candidate": asdict(self.candidate), "score": asdict(self.score)}

    @classmethod
    def read(cls, note: dict[str, Any]) -> "Measured":
        own, score = dict(note["candidate"]), dict(note["score"])
        own["others"] = OtherTypes(**own["others"])
        score["speeds"] = tuple(score["speeds"])
        return cls(Candidate(**own), FileScore(**score))


@dataclass(frozen=True)
class Sized:
    """A model whose files are made.

    Attributes:
        model: dense or pruned.
        statistics: of its inputs.
        budget: of its types.
    """

    model: Model
    statistics: Path
    budget: TypeBudget


@dataclass(frozen=True)
class Maker:
    """Makes candidates in a staging folder."""

    options: FrontierOptions
    dense: Sized
    samples: Samples
    reference: Reference
    staging: Staging
    _pruned: dict[int, Sized] = field(default_factory=dict)

    @classmethod
    def of(
        cls, options: FrontierOptions, planner: FilePlanner, samples: Samples, reference: Reference, staging: Staging
    ) -> "Maker":
        """Measure the dense model, unless an earlier run has."""
        dense = _measure(options, planner, samples, staging, "dense")
        return cls(options, dense, samples, reference, staging)

    @property
    def budget(self) -> TypeBudget:
        return self.dense.budget

    @cached_property
    def _mixtures(self) -> list[Candidate]:
        return [self.mixture(name) for name in MIXTURES]

    def mixture(self, name: GgufType) -> Candidate:
        """Return one of llama.cpp's own mixtures, by the importance of inputs."""
        plan, kl = self.budget.of_mixture(name)
        return Candidate(name, name, NO_OTHERS, plan.bytes, kl, types=f"llama.cpp's {name}")

    def singles_within(self, limit: int) -> Iterator[Candidate]:
        """Yield the best of llama.cpp's own mixtures within a size, as predicted, and of one type everywhere."""
        uniform = []
        for kind in UNIFORM:
            others = OtherTypes(embedding=kind, matrices={r"^blk\.": kind})
            plan = self.budget.planner.plan(kind, others, weighted=True)
            predicted = self.budget.predict(plan.kinds)
            uniform.append(Candidate(f"{kind} everywhere", kind, others, plan.bytes, predicted, types=kind))
        for several in (self._mixtures, uniform):
            fitting = [each for each in several if each.bytes <= limit]
            if fitting:
                yield min(fitting, key=lambda each: each.kl or 0)

    @property
    def _columns(self) -> int:
        return self.dense.model.unit_counts("mlp")[0]

    def widths(self) -> list[int]:
        """Return the columns that an MLP may keep, from many to few: multiples that leave finer types their rows.

        There are none where MLPs differ.
        """
        if len(set(self.dense.model.unit_counts("mlp"))) != 1:
            return []
        units = self._columns
        multiple = 256 if units % 256 == 0 and units >= 1024 else 32
        step = max(multiple, round(units / STEPS / multiple) * multiple)
        return list(range(units - step, units // MOST_COLUMNS, -step))

    def pruned(self, width: int, limit: int) -> Candidate | None:
        """Return a model whose MLPs keep so many columns, with types within the size; None if none are so small."""
        name = f"mlp {width}, bits by budget"
        known = self.staging.journal.notes.get(name)
        if known is not None:
            return Measured.read(known).candidate
        try:
            choice = self._sized(width).budget.at_bytes(limit)
        except BudgetError:
            return None
        return replace(Candidate.of_types(name, choice), width=width, kl=None)

    def _sized(self, width: int | None) -> Sized:
        """Return the model with so many columns, pruned and measured unless that is done."""
        if width is None:
            return self.dense
        if width not in self._pruned:
            out = self.staging.scratch / f"mlp-{width}"
            if not out.is_dir():
                place = {"output": str(out), "resume": out.with_name(f"{out.name}.partial").exists()}
                options = check_options(PruneOptions, self.prune_options(width) | place)
                prune_model(options, read_recipe(options))
            model = open_model(str(out), Opening(self.options.trust_remote_code))
            self._pruned[width] = _measure(self.options, FilePlanner(model), self.samples, self.staging, out.name)
        return self._pruned[width]

    def prune_options(self, width: int) -> dict[str, Any]:
        """Return the options of `prune` that make a model with so many columns."""
        return {
            "model": self.options.model,
            "recipe": "ridge",
            "overrides": ("spaces.heads.ratio=0", f"spaces.mlp.ratio={1 - width / self._columns:.6g}"),
            "text": self.options.text,
            "samples": self.options.samples or len(self.samples),
            "window": self.samples.tokens,
            "seed": self.options.seed,
            "evaluate_samples": 0,
            "device": self.options.device,
            "progress": self.options.progress,
        }

    def place(self, candidate: Candidate) -> Path:
        return self.staging.scratch / f"{candidate.name.replace(' ', '-').replace(',', '')}.gguf"

    def make(self, candidate: Candidate) -> Path:
        """Make a candidate's file, unless it is there."""
        place, sized = self.place(candidate), self._sized(candidate.width)
        if not place.is_file():
            with show_progress(False):
                how: dict[str, Any] = {"statistics": sized.statistics}
                if candidate.feedback:
                    how = {
                        "live": LiveSamples(self.samples, 1, _dtype_of(self.options, sized.model)),
                        "feedback": True,
                    }
                export_gguf(
                    str(sized.model.checkpoint.path),
                    place,
                    ProofOptions(),
                    kind=candidate.chosen,
                    others=candidate.others,
                    proof=False,
                    trust=self.options.trust_remote_code,
                    **how,
                )
        return place

    def measure(self, candidate: Candidate, keep: Measured | None) -> Measured:
        """Make a candidate and measure it, unless an earlier run has; leave its file, and that of the best so far."""
        notes = self.staging.journal.notes
        if candidate.name in notes:
            return Measured.read(notes[candidate.name])
        kept = {self.place(candidate), *([] if keep is None else [self.place(keep.candidate)])}
        for file in set(self.staging.scratch.glob("*.gguf")) - kept:
            file.unlink()
        measured = Measured(candidate, score_file(self.make(candidate), self.reference))
        self.staging.journal.record(candidate.name, note=measured.note())
        return measured


def _dtype_of(options: FrontierOptions, model: Model) -> torch.dtype:
    device = resolve_device(options.device)
    return resolve_compute_dtype(options.compute_dtype, device, model.dtype)


def _measure(options: FrontierOptions, planner: FilePlanner, samples: Samples, staging: Staging, name: str) -> Sized:
    """Measure a planner's model: the importance of inputs, and what each type of each matrix loses."""
    model = planner.model
    place, entry = staging.scratch / f"{name}-statistics", f"{name}: losses"
    how: dict[str, Any] = {"device": resolve_device(options.device), "compute_dtype": _dtype_of(options, model)}
    if not place.is_dir():
        measure_statistics(
            model, samples, place, seed=options.seed, folds=1, collect=("moments", "linears"), **how
        )  # fmt: skip
    losses: dict[str, dict[str, float]] | None = staging.journal.notes.get(entry)
    if losses is None:
        importance = importance_of_statistics(Statistics(place), model, "q8_0")
        few = SampleRange(samples, 0, min(len(samples), LIMITS["text"]))
        by_kind = predict_type_losses(model, few, importance, "q8_0", **how)
        losses = {matrix: {kind.name: value for kind, value in own.items()} for matrix, own in by_kind.items()}
        staging.journal.record(entry, note=losses)
    by_type = {matrix: {Kind[kind]: value for kind, value in own.items()} for matrix, own in losses.items()}
    return Sized(model, place, TypeBudget(planner, by_type))
