"""Candidates of a frontier: what each would be, and how it is made and measured."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.common.progress import show_progress
from ckpt_prune.gguf.architectures import takes_different_blocks
from ckpt_prune.gguf.choosing import TypeBudget, TypeChoice
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.importance import importance_of_statistics
from ckpt_prune.gguf.losses import predict_type_losses
from ckpt_prune.gguf.score import FileScore, Reference, measure_divergence, read_reference, score_file
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
from ckpt_prune.stages.spaces.effects.column_losses import PredictedColumns, predict_columns
from ckpt_prune.stages.spaces.effects.gradients import add_gradients

MIXTURES: tuple[GgufType, ...] = (
    *("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_nl", "iq4_xs"),
    *("q3_k_m", "q3_k_s", "iq3_s", "iq3_xxs", "q2_k", "iq2_s"),
)
"""llama.cpp's own mixtures that are in question."""
UNIFORM: tuple[Literal["q8_0", "q5_0", "q4_1", "iq4_nl"], ...] = ("q8_0", "q5_0", "q4_1", "iq4_nl")
"""Types that all matrices have at once, the embedding included."""
MOST_COLUMNS = 3
"""An MLP keeps more than one part of so many of its columns."""
COLUMN_FOLDS = 4
"""Folds of the samples that fewer columns are predicted on, of which the last is held out."""
PRUNED = "pruned"
"""Folder of a model with fewer columns."""
HEAD = 4096
"""Bytes that the head of a file may grow by where blocks differ in width."""


@dataclass(frozen=True)
class Candidate:
    """A file that may be made.

    Attributes:
        name: in words.
        chosen, others: types of its matrices.
        bytes: of the file, to the byte.
        kl: what it is predicted to lose, nats a token; None if that is not known.
        columns: that the MLP of each block keeps; empty: all.
        types: in words.
        feedback: matrices are also rounded by error feedback, behind those that are rounded.
    """

    name: str
    chosen: GgufType
    others: OtherTypes
    bytes: int
    kl: float | None
    columns: tuple[int, ...] = ()
    types: str = ""
    feedback: bool = False

    @classmethod
    def of_types(cls, name: str, choice: TypeChoice, *, feedback: bool = False) -> "Candidate":
        columns = tuple(choice.columns.values())
        return cls(name, choice.chosen, choice.others, choice.bytes, choice.kl, columns, choice.words(), feedback)


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
        own |= {"others": OtherTypes(**own["others"]), "columns": tuple(own["columns"])}
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

    def singles_within(self, limit: int, loss: float) -> Iterator[Candidate]:
        """Yield the best of llama.cpp's own mixtures within a size, and of one type everywhere.

        What is predicted to lose more than `loss` nats is left out.
        """
        uniform = []
        for kind in UNIFORM:
            others = OtherTypes(embedding=kind, matrices={r"^blk\.": kind})
            plan = self.budget.planner.plan(kind, others, weighted=True)
            predicted = self.budget.predict(plan.kinds)
            uniform.append(Candidate(f"{kind} everywhere", kind, others, plan.bytes, predicted, types=kind))
        for several in (self._mixtures, uniform):
            fitting = [each for each in several if each.bytes <= limit and (each.kl or 0) <= loss]
            if fitting:
                yield min(fitting, key=lambda each: each.kl or 0)

    @cached_property
    def joint(self) -> TypeBudget:
        """The budget of types and of columns together; of types alone where MLPs differ or have few columns.

        Fewer columns are predicted when it is asked for first.
        """
        widths = self.widths()
        if len(widths) < 2:
            return self.budget
        losses = {block: {width: own[width] for width in widths} for block, own in self._predicted.losses.items()}
        return replace(self.budget, columns=losses, alike=not self._may_differ)

    @property
    def _may_differ(self) -> bool:
        checkpoint = self.dense.model.checkpoint
        tied = "output.weight" not in self.budget.planner.plan("q8_0").kinds
        return takes_different_blocks(str(checkpoint.config["model_type"]), tied=tied)

    def widths(self) -> list[int]:
        """Return the columns that an MLP may keep, all of them at last: multiples that leave finer types their rows.

        There are none where MLPs differ.
        """
        model = self.dense.model
        counts = set(model.unit_counts("mlp"))
        if len(counts) != 1 or len(model.blocks_with("mlp")) < model.blocks:
            return []
        units = counts.pop()
        multiple = multiple_of_columns(units)
        return [*range(-(-(units // MOST_COLUMNS + 1) // multiple) * multiple, units, multiple), units]

    @cached_property
    def _predicted(self) -> PredictedColumns:
        notes, entry = self.staging.journal.notes, "columns"
        if entry not in notes:
            model, place = self.dense.model, self.staging.scratch / "grams"
            how: dict[str, Any] = {
                "device": resolve_device(self.options.device),
                "compute_dtype": _dtype_of(self.options, model),
            }
            folds = min(COLUMN_FOLDS, len(self.samples))
            if not place.is_dir():
                measure_statistics(
                    model,
                    self.samples,
                    place,
                    seed=self.options.seed,
                    folds=folds,
                    collect=("moments", "gram", "fisher"),
                    finish=lambda statistics: add_gradients(
                        model, statistics, self.samples, spaces=["mlp"], distances=False, **how
                    ),
                    **how,
                )
            units = self.widths()[-1]
            found = predict_columns(model, Statistics(place), multiple_of_columns(units), how["device"])
            self.staging.journal.record(entry, note=asdict(found))
            return found
        note = notes[entry]
        losses = {int(block): {int(kept): lost for kept, lost in own.items()} for block, own in note["losses"].items()}
        return PredictedColumns(note["score"], losses)

    def measured_columns(self, candidate: Candidate) -> float:
        """Return what the fewer columns of a candidate lose by themselves, before anything is rounded."""
        entry = f"{candidate.name}: columns alone"
        notes = self.staging.journal.notes
        if entry not in notes:
            folder = self._model(candidate).checkpoint.whole
            pruned = read_reference(folder, self.reference.windows, trust=True)
            self.staging.journal.record(entry, note=measure_divergence(pruned, self.reference))
        return float(notes[entry])

    def recipe(self, candidate: Candidate, *, export: bool) -> dict[str, Any]:
        """Return the recipe that prunes as a candidate, and with `export` also writes its file."""
        recipe: dict[str, Any] = {
            "version": 1,
            "name": "frontier",
            "target": "drift",
            "widths": "uniform" if len(set(candidate.columns)) == 1 else "per_layer",
            "container": "any",
            "spaces": {
                "mlp": {
                    "score": self._predicted.score,
                    "keep": list(candidate.columns),
                    "compensation": {"method": "auto"},
                }
            },
        }
        if export:
            others = candidate.others
            asked = {"embedding_type": others.embedding, "output_type": others.output, "types": dict(others.matrices)}
            types = {key: each for key, each in asked.items() if each}
            rounding = {"rounding": "gptq"} if candidate.feedback else {}
            recipe["export"] = {"format": "gguf", "dtype": candidate.chosen, **types, **rounding}
        return recipe

    def prune_options(self) -> dict[str, Any]:
        """Return the options of `prune` that make a candidate by its recipe."""
        return {
            "model": self.options.model,
            "text": self.options.text,
            "samples": len(self.samples),
            "window": self.samples.tokens,
            "seed": self.options.seed,
            "evaluate_samples": 0,
            "device": self.options.device,
            "progress": self.options.progress,
        }

    def _model(self, candidate: Candidate) -> Model:
        """Return the model of a candidate, pruned unless that is done."""
        if not candidate.columns:
            return self.dense.model
        digest = hashlib.sha256(json.dumps(candidate.columns).encode()).hexdigest()[:12]
        place = self.staging.scratch / f"mlp-{digest}"
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
            with show_progress(False):
                how: dict[str, Any] = {"statistics": self.dense.statistics}
                if candidate.feedback:
                    how = {"live": LiveSamples(self.samples, 1, _dtype_of(self.options, model)), "feedback": True}
                export_gguf(
                    str(model.checkpoint.path),
                    place,
                    ProofOptions(),
                    kind=candidate.chosen,
                    others=candidate.others,
                    proof=False,
                    trust=self.options.trust_remote_code or bool(candidate.columns),
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


def multiple_of_columns(units: int) -> int:
    """Return what the columns that an MLP of so many keeps are multiples of."""
    return 256 if units % 256 == 0 and units >= 1024 else 32


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
        staging.journal.record(f"{name}: statistics")  # from here on Ctrl-C keeps what is done
    losses: dict[str, dict[str, float]] | None = staging.journal.notes.get(entry)
    if losses is None:
        importance = importance_of_statistics(Statistics(place), model, "q8_0")
        few = SampleRange(samples, 0, min(len(samples), LIMITS["text"]))
        by_kind = predict_type_losses(model, few, importance, "q8_0", **how)
        losses = {matrix: {kind.name: value for kind, value in own.items()} for matrix, own in by_kind.items()}
        staging.journal.record(entry, note=losses)
    by_type = {matrix: {Kind[kind]: value for kind, value in own.items()} for matrix, own in losses.items()}
    return Sized(model, place, TypeBudget(planner, by_type))
