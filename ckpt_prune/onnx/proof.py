"""The proof that onnxruntime computes what PyTorch does: a graph against the checkpoint it was made from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import onnx
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.model_folder import find_recorded_source, resolve_model, way_to_source
from ckpt_prune.common.check import run_check
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.formatting import format_distinctly
from ckpt_prune.evaluation.batches import check_windows
from ckpt_prune.evaluation.purpose import has_other_tokenizer
from ckpt_prune.evaluation.whole_model import load_model, reads_causally
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.checks import (
    check_files,
    check_interface,
    check_operators,
    hash_present_files,
    read_structure,
)
from ckpt_prune.onnx.comparison import (
    IMAGE_BATCHES,
    STEPS,
    TextCase,
    compare_outputs,
    flatten_output,
    flatten_positions,
    make_chunk_cases,
    make_image_batches,
    make_noise_pixels,
    make_noise_windows,
    make_prompts,
    make_text_cases,
)
from ckpt_prune.onnx.half_range import measure_half_range
from ckpt_prune.onnx.metrics import (
    MEAN_SHARE,
    Allowance,
    measure_image_metric,
    measure_pair_metric,
    measure_text_metric,
)
from ckpt_prune.onnx.pairs import (
    TARGET,
    OnnxPair,
    PairCase,
    PairReference,
    make_noise_pairs,
    make_pair_case,
    make_pair_cases,
)
from ckpt_prune.onnx.records import (
    Case,
    CheckName,
    Continuation,
    GraphSource,
    Manifest,
    Metric,
    OutputPlace,
    Padding,
    Port,
    ProofCheck,
    Validation,
    Validations,
    read_manifest,
    runtime_versions,
)
from ckpt_prune.onnx.reference import GraphReference, HeldModel
from ckpt_prune.onnx.samples import ProofSamples
from ckpt_prune.onnx.session import OnnxModel, Provider, complete_inputs, default_provider, next_cache
from ckpt_prune.onnx.stored import Output, read_stored, store_large
from ckpt_prune.onnx.tasks import PAST, PRESENT, GraphTask
from ckpt_prune.onnx.tracing import get_image_size

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}
"""By the graph's type: the largest difference that passes, in units of the case's largest output."""
MAX_LOSS = {"int8": 0.02, "int4": 0.1, "q4f16": 0.1}
"""By the graph's type: what rounding may cost the task's metric."""
PROMPT, CONTINUED = 16, 32
"""Tokens of a text that is continued, and tokens that are generated after it."""
MOST_NOISE = 64
"""Tokens of a window of noise."""
_RANGE_SAMPLES = 2
"""Samples on which the size of values in float16 is measured."""


Given = dict[str, Output] | str
"""Outputs of a graph by name, or why there are none."""


@dataclass(frozen=True)
class Dense:
    """Another model that a graph is compared with: what pruning and rounding cost together, and what they may."""

    folder: Path
    max_loss: float | None = None
    """None: it is only measured."""


@dataclass(frozen=True)
class Other:
    """A dense model that is loaded."""

    name: str
    reference: GraphReference
    max_loss: float | None


def find_dense(name: str | None, max_loss: float | None, model: Path) -> Dense | None:
    """Return the dense model that is named, downloaded if it is on the Hub. UserError if `model` has other tokens."""
    if name is None:
        if max_loss is not None:
            raise UserError("--max-loss-dense goes with --dense MODEL")
        return None
    folder = resolve_model(name)
    if has_other_tokenizer(model, folder):
        raise UserError(
            f"--dense {name} has another tokenizer than {model}: "
            f"`ckpt-prune evaluate {model} --against {name} --text FILE` compares them in bits per byte"
        )
    return Dense(folder, max_loss)


def validate(
    folder: Path,
    model: Path,
    samples: ProofSamples,
    *,
    provider: Provider | None = None,
    tolerance: float | None = None,
    max_loss: float | None = None,
    dense: Dense | None = None,
    trust: bool = False,
) -> Validations:
    """Compare the graphs of a folder with the model they were made from.

    The whole model is loaded, with the checkpoint's own values in float32 on the CPU. Whatever the graph's type is, the
    differences then show everything that the export did. onnxruntime keeps the weights in a layout of its own. So the
    model is freed while the graph runs, and loaded again afterwards. Both are held only for a metric that needs another
    run of the graph.

    A case passes if the largest difference is at most `tolerance` times the largest output in PyTorch, and the mean
    difference a tenth of that. By default 1e-4 in fp32: float32 moves outputs by 1e-7 to 1e-5 of the largest one. In
    fp16 2e-2: one operation is off by 5e-4, and this adds up over layers to a few 1e-3. A wrong weight, mask or
    position moves outputs by 1e-1 and more. Outputs of a graph that is rounded to int8 or int4 must be finite. Such a
    graph may lose at most `max_loss` of the task's metric, by default 2 % in int8 and 10 % in int4.

    Args:
        model: the checkpoint it was made from.
        provider: what onnxruntime runs on; None: what the graph is fused for, else the CPU.
        dense: another model that the metric is compared with as well.

    Returns:
        The outcome, also if the graph is damaged or wrong.

    Raises:
        UserError: the folder is no export, or not of this model; a model does not load or fails on the samples; or a
            graph cannot be run on the provider.
    """
    manifest = read_manifest(folder)
    checkpoint = Checkpoint.open(model, packed=True)
    _check_source(folder, manifest, checkpoint)
    given = {"image": samples.images, "text": samples.windows, "pairs": samples.pairs}
    if any(each is not None for modality, each in given.items() if modality != manifest.modality):
        raise UserError(f"{folder} reads {manifest.modality}: it cannot be compared on the other")
    whole_model = _hold(checkpoint, trust)
    others = _load_others(dense, manifest.full_task, trust)
    validations = []
    kinds: dict[str, type[GraphProof]] = {"text": TextProof, "image": ImageProof, "pairs": PairProof}
    for graph in manifest.split_by_type():
        reference = _refer(whole_model, graph.full_task, {port.name for port in graph.inputs})
        allowance = _allow(graph, tolerance, max_loss)
        kind = kinds[graph.modality]
        in_half = partial(_load, checkpoint, trust, torch.float16)
        proof = kind(folder, graph, reference, in_half, samples, allowance, others)
        proof.run(provider or default_provider(graph.optimize))
        session = None if proof.graph is None else proof.graph.session
        validations.append(
            Validation(
                file=graph.graphs[-1].file,
                passed=all(check.passed is not False for check in proof.checks),
                provider="cpu" if session is None else session.provider,
                note=None if session is None else session.note,
                dtype=graph.dtype,
                tolerance=None if allowance.rounded else allowance.tolerance,
                max_loss=allowance.max_loss,
                against=GraphSource(name=checkpoint.name, fingerprint=checkpoint.fingerprint),
                data=samples.description or {"what": "noise", "seed": samples.seed},
                checks=proof.checks,
                cases=proof.cases,
                metrics=proof.metrics,
                continuations=proof.continuations,
                versions=runtime_versions(),
                files=proof.present,
            )
        )
    return Validations.of(validations)


def find_source(folder: Path, manifest: Manifest) -> Path:
    """Return the model that a folder was made from, if it lies in it, or beside it, or where `frontier` read it."""
    above = folder.resolve().parent
    for place in (above, above / Path(manifest.source.name).name, find_recorded_source(folder)):
        if place is None or not (place / CONFIG).is_file():
            continue
        try:
            if Checkpoint.open(place, packed=True).fingerprint == manifest.source.fingerprint:
                return place
        except UserError:  # another folder, or one that changed
            continue
    raise UserError(
        f"{folder} neither lies in nor beside {manifest.source.name}, which it was made from{way_to_source(folder)}: "
        "give --against MODEL"
    )


def _check_source(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> None:
    if manifest.source.fingerprint != checkpoint.fingerprint:
        names = f"its record names {manifest.source.name}{way_to_source(folder)}"
        raise UserError(f"{folder} was not made from {checkpoint.path}: {names}")


def _hold(checkpoint: Checkpoint, trust: bool, *, unpack: bool = True) -> HeldModel:
    """Return the WHOLE model of a checkpoint in float32 on the CPU, loaded when it is needed."""
    return HeldModel(lambda: _load(checkpoint, trust, torch.float32, unpack=unpack))


def _load(checkpoint: Checkpoint, trust: bool, dtype: torch.dtype, *, unpack: bool = True) -> PreTrainedModel:
    return load_model(checkpoint.whole, device="cpu", dtype=dtype, trust_remote_code=trust, unpack=unpack)


def _refer(model: HeldModel, task: GraphTask, inputs: set[str]) -> GraphReference:
    return (PairReference if task.modality == "pairs" else GraphReference)(model, task, inputs)


def _load_others(dense: Dense | None, task: GraphTask, trust: bool) -> list[Other]:
    """Load the dense model that the metric is also compared with, WHOLE; none if there is none."""
    if dense is None:
        return []
    other = Checkpoint.open(dense.folder)
    return [Other(other.name, _refer(_hold(other, trust, unpack=False), task, set()), dense.max_loss)]


def _allow(graph: Manifest, tolerance: float | None, max_loss: float | None) -> Allowance:
    if graph.is_rounded:
        return Allowance(TOLERANCES.get(graph.dtype, 0.0), MAX_LOSS[graph.dtype] if max_loss is None else max_loss)
    return Allowance(TOLERANCES.get(graph.dtype, 0.0) if tolerance is None else tolerance)


# ---- the metric ----------------------------------------------------------------------------------------------------

Measure = Callable[[GraphReference, Allowance], Metric | str]
"""The task's metric of a graph beside a model, or why there is none."""


def _measure_for(graph: OnnxModel | OnnxPair, task: GraphTask, samples: ProofSamples, folder: Path) -> Measure:
    def measure(reference: GraphReference, allowance: Allowance) -> Metric | str:
        if isinstance(graph, OnnxPair):
            assert samples.pairs is not None
            return measure_pair_metric(graph, reference, samples.pairs, allowance)
        if samples.images is not None:
            return measure_image_metric(graph, reference, task.name, samples.images, allowance)
        assert samples.windows is not None
        metric = measure_text_metric(graph, reference, task.name, samples.windows, folder, allowance)
        count = len(samples.windows)
        return metric if isinstance(metric, str) else metric.model_copy(update={"windows": count})

    return measure


def _judge_metric(
    measure: Measure, reference: GraphReference, allowance: Allowance, others: Sequence[Other]
) -> tuple[list[Metric], bool | None, str]:
    """A task's metric beside the model's, and beside that of each other model; whether they pass, and both in words."""
    metric = measure(reference, allowance)
    if isinstance(metric, str):
        return [], None, metric
    metrics, sentences = [metric], [_describe_metric(metric)]
    for other in others:
        reference.let_go()  # one model at a time
        judged = measure(other.reference, Allowance(0.0, math.inf if other.max_loss is None else other.max_loss))
        if isinstance(judged, Metric):
            passed = other.max_loss is None or judged.passed
            judged = judged.model_copy(update={"against": other.name, "tolerance": other.max_loss, "passed": passed})
            metrics.append(judged)
            sentences.append(f"{_describe_metric(judged)} of {other.name}")
    return metrics, all(each.passed for each in metrics), "; ".join(sentences)


def _describe_metric(metric: Metric) -> str:
    difference, allowed = metric.difference, metric.tolerance
    if difference is None:
        return f"{metric.name}: not finite apart" + ("" if allowed is None else f", {allowed:.1e} allowed")
    if allowed is None:
        return f"{metric.name}: {difference:.1e} apart"
    apart, most = format_distinctly(difference, allowed, "e", 1)
    return f"{metric.name}: {apart} apart, {most} allowed"


# ---- all checks ----------------------------------------------------------------------------------------------------


class GraphProof:
    """The checks, in order; what needs an earlier one that failed is skipped.

    The graph runs first, on everything, and then the model: only one of both is in memory, unless the graph has to run
    again for the metric.

    Args:
        in_half: loads the reference's model in float16.
        samples: what both are run on.
        allowance: how far outputs may be apart, or how much the metric may lose.
        others: models that the metric is compared with as well.

    Attributes:
        graph: once it has been loaded; closed when nothing needs it any more.
    """

    image: tuple[int, int, int] | None = None
    """(C, H, W) of a model of images."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reference: GraphReference,
        in_half: Callable[[], PreTrainedModel],
        samples: ProofSamples,
        allowance: Allowance,
        others: Sequence[Other] = (),
    ) -> None:
        self.folder, self.manifest, self.reference, self.samples = folder, manifest, reference, samples
        self._in_half = in_half
        self.allowance, self.others = allowance, others
        self.present = hash_present_files(folder, manifest)
        self.ports = {port.name: port for port in manifest.outputs}
        self.graph: OnnxModel | OnnxPair | None = None
        self.checks: list[ProofCheck] = []
        self.cases: list[Case] = []
        self.metrics: list[Metric] = []
        self.continuations: list[Continuation] = []
        self._prepare()

    def _prepare(self) -> None:
        raise NotImplementedError

    def _small_feed(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _typical_feed(self) -> dict[str, Tensor]:
        """Return the inputs of some samples, whole."""
        raise NotImplementedError

    def _run_graph(self) -> None:
        """Run the graph on everything that its outputs are compared on, and keep them, large ones on disk."""
        raise NotImplementedError

    def _check_outputs(self) -> tuple[bool, str]:
        raise NotImplementedError

    def _check_generation(self) -> tuple[bool, str]:
        raise NotImplementedError

    def run(self, provider: Provider) -> None:
        self._check("files", lambda: check_files(self.folder, self.manifest, self.present))
        self._check("checker", self._check_operators)
        sound = self._check("interface", self._check_interface)
        for reference in (self.reference, *(other.reference for other in self.others)):
            reference.let_go()
        if self.manifest.float_type == "float16":
            self._check("range", self._check_range)
        loaded = self._check("load", lambda: self._load(provider))
        if sound and loaded:
            self._run_graph()
        if self._metric_is_known():
            self._close_graph()
        reason = "it does not load" if not loaded else "inputs or outputs are not the model's"
        later: list[tuple[CheckName, Callable[[], tuple[bool | None, str]]]] = [("outputs", self._check_outputs)]
        if self.manifest.cached:
            later.append(("generation", self._check_generation))
        for name, check in [*later, ("metric", self._check_metric)]:
            if name == "metric" and any(case.max_abs is None and case.where is None for case in self.cases):
                sound, reason = False, "there are outputs that cannot be compared"
            if sound and loaded:
                self._check(name, check)
            else:
                self.checks.append(ProofCheck(name=name, passed=None, detail=f"not run: {reason}"))
        self._close_graph()

    def _close_graph(self) -> None:
        if self.graph is not None:
            self.graph.close()

    def _check(self, name: CheckName, check: Callable[[], tuple[bool | None, str]]) -> bool:
        outcome = run_check(name, check)
        self.checks.append(ProofCheck(name=name, passed=outcome.passed, detail=outcome.detail))
        return outcome.passed is not False

    @cached_property
    def _structure(self) -> onnx.ModelProto:
        """The graph without its weights; it is read before the model is, so that both are not held at once."""
        return read_structure(self.folder / self.manifest.file)

    def _check_operators(self) -> tuple[bool, str]:
        return check_operators(self._structure, self.manifest)

    def _check_interface(self) -> tuple[bool, str]:
        feed = self._small_feed()
        outputs, cache = self.reference.run_with_cache(feed) if self.manifest.cached else (self.reference.run(feed), {})
        names = {port.name for port in self.manifest.inputs}
        missing = [name for name in self.reference.needs if name not in names and self.reference.depends_on(name)]
        return check_interface(self._structure, self.manifest, list(outputs), list(cache), missing)

    def _check_range(self) -> tuple[bool, str]:
        feed = {name: value[:_RANGE_SAMPLES] for name, value in self._typical_feed().items()}
        feed = {name: value.half() if value.is_floating_point() else value for name, value in feed.items()}
        half_model = HeldModel(self._in_half)
        reference = self.reference.with_model(half_model.get())
        span = measure_half_range(reference.module, lambda: reference.run(feed))
        half_model.let_go()
        return span.fits, span.describe()

    def _load(self, provider: Provider) -> tuple[bool, str]:
        try:
            self.graph = OnnxModel(self.folder, self.manifest.file, provider=provider)
        except UserError:
            raise
        except Exception as error:  # transformers raises anything over a damaged config.json
            raise UserError(f"config.json: {one_line(error)}") from error
        inputs = [port.name for port in self.manifest.inputs]
        if list(self.graph.outputs) != list(self.ports) or list(self.graph.inputs) != inputs:
            return False, f"{self.manifest.file} has inputs and outputs that its record does not name"
        return True, f"onnxruntime, {self.graph.session.provider.upper()}"

    def _check_metric(self) -> tuple[bool | None, str]:
        if not self._has_data:
            option = {"text": "--text", "image": "--images", "pairs": "--data"}[self.manifest.modality]
            return None, f"not measured on noise: give {option}"
        graph, reference = self._reuse_outputs()
        measure = _measure_for(graph, self.manifest.full_task, self.samples, self.folder)
        self.metrics, passed, detail = _judge_metric(measure, reference, self.allowance, self.others)
        return passed, detail

    @property
    def _has_data(self) -> bool:
        samples = self.samples
        return any(each is not None for each in (samples.images, samples.windows, samples.pairs))

    def _metric_is_known(self) -> bool:
        """Return True if no metric is measured, or one for which the graph need not run again."""
        return not self._has_data

    def _reuse_outputs(self) -> tuple[OnnxModel | OnnxPair, GraphReference]:
        """Return the graph and its reference, which need not run again on what they have read."""
        assert self.graph is not None
        return self.graph, self.reference

    def _run(self, feed: dict[str, Tensor]) -> dict[str, Tensor] | str:
        """Return the outputs of the graph, or say why there are none."""
        assert isinstance(self.graph, OnnxModel)
        try:
            return self.graph.run(feed)
        except UserError as error:
            return str(error)

    def _compare(
        self,
        given: Given,
        expected: dict[str, Tensor],
        *,
        padding: Padding = "none",
        keep: Tensor | None = None,
        cache: Literal["none", "chunks", "steps"] = "none",
        segments: bool = False,
    ) -> list[Case]:
        """Return a case for each output that PyTorch returns too, or for the main one if onnxruntime failed.

        Args:
            given: of onnxruntime.
            expected: of PyTorch, (B, ...), of a text's tokens (B, T, ...).
            keep: bool (B, T), false where a token is padding; None for images.
            cache: how the text was read.
            segments: whether it was in two.
        """
        batch = len(next(iter(expected.values())))
        tokens = None if keep is None else keep.shape[1]
        facts: dict[str, Any] = {
            "batch": batch,
            "tokens": tokens,
            "padding": padding,
            "cache": cache,
            "segments": segments,
        }
        if isinstance(given, str):
            return [Case(**facts, output=next(iter(expected)), passed=False, note=given)]
        return [
            self._compare_output(facts | {"output": name}, self.ports[name], given[name], theirs, keep)
            for name, theirs in expected.items()
            if name in given
        ]

    def _compare_output(
        self, facts: dict[str, Any], port: Port, ours: Output, theirs: Tensor, keep: Tensor | None
    ) -> Case:
        if ours.shape != theirs.shape:
            note = f"{list(ours.shape)} in onnxruntime, {list(theirs.shape)} in PyTorch"
            return Case(**facts, passed=False, note=note)
        if port.name.startswith(PRESENT):  # (B, heads, T, head_dim)
            ours, theirs = read_stored(ours).movedim(2, 1), theirs.movedim(2, 1)
        elif self.image is not None and theirs.dim() > 2:  # patches, none of them padding
            keep = torch.ones(theirs.shape[:2], dtype=torch.bool)
        elif len(port.shape) < 2 or isinstance(port.shape[1], int):  # of a whole text or image
            keep = None
        a, b = flatten_output(ours, keep), flatten_positions(theirs, keep)
        # Units of question-answering are positions, not classes.
        classes = port.name.endswith("logits") and self.manifest.task != "question-answering"
        difference = compare_outputs(a, b, classes=classes)
        if self.allowance.rounded:
            passed = math.isfinite(difference.max_abs)
        else:
            limit = self.allowance.tolerance * difference.largest
            passed = difference.max_abs <= limit and difference.mean_abs <= limit * MEAN_SHARE
        case = Case(
            **facts,
            max_abs=_finite(difference.max_abs),
            mean_abs=_finite(difference.mean_abs),
            max_rel=_finite(difference.max_rel),
            mean_rel=_finite(difference.mean_rel),
            largest=difference.largest,
            agreement=difference.agreement,
            passed=passed,
        )
        if passed:
            return case
        position, unit = difference.worst
        row, token = (position, None) if keep is None else map(int, keep.nonzero()[position])
        value, reference = a[position : position + 1][0, unit].item(), b[position, unit].item()
        case.where = OutputPlace(
            batch=row, token=token, unit=unit, onnxruntime=_finite(value), pytorch=_finite(reference)
        )
        if not math.isfinite(reference):
            case.note = "PyTorch's own output is no finite number there: the model is damaged, or overflows in float32"
        elif not math.isfinite(value):
            case.note = f"onnxruntime's output is {value} there"
            if self.manifest.float_type == "float16":
                case.note += ": float16 holds no more than 65504"
        return case

    def _conclude(self, cases: list[Case], what: str) -> tuple[bool, str]:
        """Keep cases, and say whether all of them passed."""
        self.cases += cases
        failed, tolerance = sum(not case.passed for case in cases), self.allowance.tolerance
        if self.allowance.rounded:
            if failed:
                return False, f"{failed} of {len(cases)} {what} are not finite, or not of PyTorch's shape"
            return (
                True,
                f"{len(cases)} {what} are finite and of PyTorch's shape; rounded, they are held to no tolerance",
            )
        if failed:
            return False, f"{failed} of {len(cases)} {what} are outside the tolerance of {tolerance:g}"
        most = max(map(_relative_error, cases))
        return True, f"{len(cases)} {what} within {tolerance:g}: at most {most:.1e} of the largest output"

    def _conclude_generation(self, cases: list[Case], what: str) -> tuple[bool, str]:
        """Conclude, and say how many of the generated tokens are the same."""
        passed, detail = self._conclude(cases, what)
        same = [case.agreement for case in cases if case.agreement is not None]
        return passed, f"{detail}; {min(same, default=0.0):.1%} of the tokens are the same"


class _KnownLogits:
    """A language model that has read a window, and reads no other: its logits for it are known, (1, T, vocabulary)."""

    device = torch.device("cpu")

    def __init__(self, config: PreTrainedConfig, window: Tensor, logits: Tensor) -> None:
        self.config, self._window, self._logits = config, window, logits

    def eval(self) -> "_KnownLogits":
        return self

    def parameters(self) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, *, input_ids: Tensor, use_cache: bool = False) -> ModelOutput:
        assert torch.equal(input_ids, self._window)
        return ModelOutput(logits=self._logits)


class ImageProof(GraphProof):
    """The checks of a graph that reads images."""

    def _prepare(self) -> None:
        self._given: list[Given] = []
        config, images = self.reference.config, self.samples.images
        self.image = (getattr(config, "num_channels", 3), *get_image_size(config, self.manifest.full_task))
        if images is None:
            self.pixels = make_noise_pixels(self.image, self.samples.seed)
            return
        if images.size != self.image:
            made, read = (" x ".join(map(str, size)) for size in (images.size, self.image))
            raise UserError(f"the images are {made} after preprocessing, the model reads {read}")
        self.pixels = images.batch(slice(max(IMAGE_BATCHES)))["pixel_values"]

    def _small_feed(self) -> dict[str, Tensor]:
        assert self.image is not None
        return {"pixel_values": torch.zeros(1, *self.image)}

    def _typical_feed(self) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels}

    def _run_graph(self) -> None:
        self._given = [_store(self._run({"pixel_values": pixels})) for pixels in make_image_batches(self.pixels)]

    def _check_outputs(self) -> tuple[bool, str]:
        cases: list[Case] = []
        for pixels, outputs in zip(make_image_batches(self.pixels), self._given, strict=True):
            cases += self._compare(outputs, self.reference.run({"pixel_values": pixels}))
        return self._conclude(cases, "outputs")


class TextProof(GraphProof):
    """The checks of a graph that reads text."""

    def _prepare(self) -> None:
        self._whole: list[tuple[TextCase, Given]] = []
        """Texts in one pass, and what the graph returned."""
        self._in_chunks: list[tuple[TextCase, Given]] = []
        """Texts through the cache in pieces."""
        self._generated: list[tuple[TextCase, TextCase, Given]] = []
        """Prompts, what they became, and the logits of each step."""
        self._continued: tuple[Tensor, list[int]] | None = None
        """A prompt, (1, T), and the tokens that the graph continues it by."""
        self._known: dict[str, Output] = {}
        """Logits of the only window that the metric is measured on, of the graph and of PyTorch."""
        config = self.reference.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.context: int | None = context_length(config)
        if self.samples.windows is None:
            window = MOST_NOISE if self.context is None else min(MOST_NOISE, self.context)
            self.windows = make_noise_windows(self.vocabulary, window, self.samples.seed)
        else:
            self.windows = self.samples.windows
            check_windows(self.reference.model, self.windows)
        pad = getattr(config, "pad_token_id", None)
        self.pad = pad if isinstance(pad, int) and 0 <= pad < self.vocabulary else 0

    def _small_feed(self) -> dict[str, Tensor]:
        return complete_inputs({"input_ids": torch.ones(2, 2, dtype=torch.int64)})

    def _typical_feed(self) -> dict[str, Tensor]:
        return complete_inputs({"input_ids": self.windows})

    def _run_graph(self) -> None:
        pads_left = self.manifest.task == "text-generation" or reads_causally(self.reference.config.to_dict())
        for case in make_text_cases(self.windows, pad=self.pad, left=pads_left, segments=self.reference.segments > 1):
            outputs = _store(self._run(_make_feed(case) | self._empty_cache(case)))
            if self._is_measured(case.ids) and not isinstance(outputs, str):
                self._known["graph"] = outputs["logits"]
            self._whole.append((case, outputs))
        if not self.manifest.cached:
            return
        for case in make_chunk_cases(self.windows, pad=self.pad):
            self._in_chunks.append((case, _store(self._run_chunks(case))))
        for case in make_prompts(self.windows, pad=self.pad, context=self.context):
            logits, text = self._generate(case, self._count_steps(case))
            self._generated.append((case, text, outputs := _store(logits)))
        if self.allowance.rounded and self.samples.windows is not None and not isinstance(outputs, str):
            self._continue_text()

    def _check_outputs(self) -> tuple[bool, str]:
        cases: list[Case] = []
        # What has been compared is dropped: logits of a long window are large.
        while self._whole:
            case, outputs = self._whole.pop(0)
            expected = self.reference.run(_make_feed(case))
            if "graph" in self._known and self._is_measured(case.ids):
                self._known["pytorch"] = expected["logits"]
            two = case.segments is not None
            cases += self._compare(outputs, expected, padding=case.padding, keep=case.keep, segments=two)
        while self._in_chunks:
            cases += self._compare_chunks(*self._in_chunks.pop(0))
        return self._conclude(cases, "outputs")

    def _is_measured(self, ids: Tensor) -> bool:
        """Return True if the metric is that of a language model on these very tokens."""
        measured = self.samples.windows
        return measured is not None and self.manifest.task == "text-generation" and torch.equal(ids, measured)

    def _metric_is_known(self) -> bool:
        return "graph" in self._known or super()._metric_is_known()

    def _reuse_outputs(self) -> tuple[OnnxModel | OnnxPair, GraphReference]:
        if "graph" not in self._known:
            return super()._reuse_outputs()
        self.reference.let_go()
        stored = {
            side: _KnownLogits(self.reference.config, self.windows, read_stored(value))
            for side, value in self._known.items()
        }
        self._known = {}
        ours = cast(OnnxModel, stored["graph"])
        # If PyTorch failed before, it will again.
        return ours, self.reference.with_model(stored["pytorch"]) if "pytorch" in stored else self.reference

    def _compare_chunks(self, case: TextCase, given: Given) -> list[Case]:
        """A text through the cache in pieces, against one pass in PyTorch: outputs, and the keys and values kept."""
        expected, kept = self.reference.run_with_cache(_make_feed(case))
        cases = self._compare(given, expected, padding=case.padding, keep=case.keep, cache="chunks")
        if isinstance(given, str):
            return cases
        layers = self._compare(given, kept, padding=case.padding, keep=case.keep, cache="chunks")
        return [*cases, _find_worst(layers, PRESENT + "*")]

    def _run_chunks(self, case: TextCase) -> dict[str, Tensor] | str:
        cache, pieces, start = self._empty_cache(case), [], 0
        for size in case.chunks:
            end = start + size
            feed = {"input_ids": case.ids[:, start:end], "attention_mask": case.keep[:, :end].long()}
            outputs = self._run(complete_inputs(feed) | cache)
            if isinstance(outputs, str):
                return outputs
            cache = next_cache(outputs)
            pieces.append({name: value for name, value in outputs.items() if not name.startswith(PRESENT)})
            start = end
        joined = {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}
        return joined | {name.replace(PAST, PRESENT, 1): value for name, value in cache.items()}

    def _check_generation(self) -> tuple[bool, str]:
        """Compare texts that the graph wrote through its cache; PyTorch reads them in one pass."""
        cases: list[Case] = []
        for prompt, text, outputs in self._generated:
            length, steps = prompt.ids.shape[1], self._count_steps(prompt)
            expected = self.reference.run(_make_feed(text))["logits"][:, length - 1 :]
            keep = torch.ones(len(prompt.ids), steps, dtype=torch.bool)
            compared = self._compare(outputs, {"logits": expected}, padding=prompt.padding, keep=keep, cache="steps")
            for each in compared:
                each.tokens = length + steps
            cases += compared
        if self._continued is not None:
            self._compare_continuation(*self._continued)
        return self._conclude_generation(cases, "texts")

    def _count_steps(self, prompt: TextCase) -> int:
        """Return how many tokens are generated after a prompt; the last is chosen, not read."""
        return STEPS if self.context is None else min(STEPS, self.context - prompt.ids.shape[1] + 1)

    def _generate(self, case: TextCase, steps: int) -> tuple[dict[str, Tensor] | str, TextCase]:
        """Let the graph take its likeliest token, step by step, through its cache.

        Returns:
            Its logits at each step, (B, steps, vocabulary), or why there are none; and the text that it read.
        """
        logits: list[Tensor] = []
        cache, new, text = self._empty_cache(case), case.ids, case
        while True:
            feed = {"input_ids": new, "attention_mask": text.keep.long()}
            outputs = self._run(complete_inputs(feed) | cache)
            if isinstance(outputs, str):
                return outputs, text
            logits.append(outputs["logits"][:, -1])
            if len(logits) == steps:
                return {"logits": torch.stack(logits, 1)}, text
            # A damaged graph may have more tokens than PyTorch can read.
            new = logits[-1].argmax(-1, keepdim=True).clamp_max(self.vocabulary - 1)
            cache = next_cache(outputs)
            keep = torch.cat([text.keep, torch.ones_like(new, dtype=torch.bool)], 1)
            text = replace(text, ids=torch.cat([text.ids, new], 1), keep=keep)

    def _continue_text(self) -> None:
        """Let the graph continue a text by its own tokens."""
        ids = self.windows[:1, : min(PROMPT, self.windows.shape[1])]
        room = CONTINUED if self.context is None else min(CONTINUED, self.context - ids.shape[1])
        if room < 1:
            return
        outputs, _ = self._generate(TextCase(ids, torch.ones_like(ids, dtype=torch.bool), "none"), room)
        if not isinstance(outputs, str):
            self._continued = ids, outputs["logits"][0].argmax(-1).tolist()

    def _compare_continuation(self, ids: Tensor, ours: list[int]) -> None:
        """Let PyTorch continue the text by its own tokens, too: errors add up in words."""
        room = len(ours)
        theirs = [int(last.argmax(-1)) for _, last in self.reference.generate(ids, torch.ones_like(ids), room)]
        same = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), room)
        texts = _decode(self.folder, [ids[0].tolist(), ours, theirs])
        self.continuations.append(
            Continuation(prompt=texts[0], onnxruntime=texts[1], pytorch=texts[2], tokens=room, same=same)
        )

    def _empty_cache(self, case: TextCase) -> dict[str, Tensor]:
        assert isinstance(self.graph, OnnxModel)
        return self.graph.empty_cache(len(case.ids))


class PairProof(GraphProof):
    """The checks of the graphs of an encoder and a decoder."""

    def _prepare(self) -> None:
        self._read_once: list[tuple[PairCase, Given]] = []
        """Pairs, and what the graphs returned, in one pass or in pieces."""
        self._generated: list[tuple[PairCase, PairCase, Given]] = []
        """Sources with the start of a target, with what was generated, and the logits of each step."""
        config = self.reference.config
        self.ports = {port.name: port for graph in self.manifest.graphs for port in graph.outputs}
        self.context: int | None = context_length(config.get_text_config(decoder=True))
        self.pairs = self.samples.pairs or make_noise_pairs(config, self.context, self.samples.seed)

    def _typical_feed(self) -> dict[str, Tensor]:
        return make_pair_case(self.pairs, _RANGE_SAMPLES).feed

    def _check_both(self, check: Callable[[Manifest], tuple[bool, str]]) -> tuple[bool, str]:
        """Return what a check says of both graphs, or of the first that fails it."""
        details = []
        for graph in self.manifest.split():
            passed, detail = check(graph)
            if not passed:
                return False, f"{graph.file}: {detail}"
            details.append(f"{graph.graph.stack}: {detail}")
        return True, "; ".join(details)

    def _check_operators(self) -> tuple[bool, str]:
        return self._check_both(lambda graph: check_operators(read_structure(self.folder / graph.file), graph))

    def _check_interface(self) -> tuple[bool, str]:
        _, kept = self.reference.run_with_cache(make_pair_case(self.pairs, 1).feed)

        def check(graph: Manifest) -> tuple[bool, str]:
            decodes = graph.graph.stack == "decoder"
            outputs, cache = (["logits"], list(kept)) if decodes else (["last_hidden_state"], [])
            return check_interface(read_structure(self.folder / graph.file), graph, outputs, cache)

        return self._check_both(check)

    def _load(self, provider: Provider) -> tuple[bool, str]:
        entries = self.manifest.graphs
        pair = OnnxPair(self.folder, [entry.file for entry in entries], provider=provider)
        for model, entry in zip(pair.graphs, entries, strict=True):
            recorded = [port.name for port in entry.inputs], [port.name for port in entry.outputs]
            if (list(model.inputs), list(model.outputs)) != recorded:
                return False, f"{entry.file} has inputs and outputs that its record does not name"
        self.graph = pair
        return True, f"onnxruntime, {pair.session.provider.upper()}"

    def _run_graph(self) -> None:
        for case in make_pair_cases(self.pairs):
            self._read_once.append((case, _store(self._run_chunks(case))))
        for size in (1, 2):
            start = make_pair_case(self.pairs, size)
            logits, went_on = self._generate(start)
            self._generated.append((start, went_on, _store(logits)))

    def _run_chunks(self, case: PairCase) -> dict[str, Tensor] | str:
        assert isinstance(self.graph, OnnxPair)
        states, cache, start, pieces = None, None, 0, []
        outputs: dict[str, Tensor] = {}
        for size in case.chunks or (case.targets.shape[1],):
            part = case.feed | {TARGET: case.feed[TARGET][:, start : start + size]}
            try:
                outputs = self.graph.read(part, states, cache)
            except UserError as error:
                return str(error)
            states, cache, start = outputs["last_hidden_state"], next_cache(outputs), start + size
            pieces.append(outputs["logits"])
        return outputs | {"logits": torch.cat(pieces, 1)}

    def _generate(self, start: PairCase) -> tuple[dict[str, Tensor] | str, PairCase]:
        """Let the graphs take their likeliest token, step by step, behind the first of the targets.

        Returns:
            The logits of each step, (B, steps, vocabulary), or why there are none; and what the decoder read.
        """
        assert isinstance(self.graph, OnnxPair)
        logits: list[Tensor] = []
        new = read = start.feed[TARGET][:, :1]
        states, cache = None, None
        for _ in range(STEPS if self.context is None else min(STEPS, self.context)):
            read = torch.cat([read, new], 1) if logits else read
            try:
                outputs = self.graph.read(start.feed | {TARGET: new}, states, cache)
            except UserError as error:
                return str(error), start
            logits.append(outputs["logits"][:, -1])
            states, cache = outputs["last_hidden_state"], next_cache(outputs)
            new = logits[-1].argmax(-1, keepdim=True)
        keep = torch.ones_like(read, dtype=torch.bool)
        return {"logits": torch.stack(logits, 1)}, replace(start, feed=start.feed | {TARGET: read}, targets=keep)

    def _check_outputs(self) -> tuple[bool, str]:
        cases: list[Case] = []
        while self._read_once:
            case, given = self._read_once.pop(0)
            cases += self._compare_pairs(case, given)
        return self._conclude(cases, "outputs")

    def _compare_pairs(self, case: PairCase, given: Given) -> list[Case]:
        """Encoder's states, logits, and keys and values of both, against one pass in PyTorch."""
        expected, kept = self.reference.run_with_cache(case.feed)
        compare = partial(self._compare, given, padding=case.padding, cache="chunks" if case.chunks else "none")
        cases = compare({"logits": expected.pop("logits")}, keep=case.targets)
        if isinstance(given, str):
            return cases
        cases += compare(expected, keep=case.sources)
        for kind, keep in (("decoder", case.targets), ("encoder", case.sources)):
            values = {name: value for name, value in kept.items() if f".{kind}." in name}
            cases.append(_find_worst(compare(values, keep=keep), f"{PRESENT}*.{kind}.*"))
        return cases

    def _check_generation(self) -> tuple[bool, str]:
        """Compare targets that the graphs wrote; PyTorch reads them in one pass."""
        cases: list[Case] = []
        for _, went_on, given in self._generated:
            expected = {"logits": self.reference.run(went_on.feed)["logits"]}
            if not isinstance(given, str):
                expected = {"logits": expected["logits"][:, : given["logits"].shape[1]]}
            cases += self._compare(given, expected, padding=went_on.padding, keep=went_on.targets, cache="steps")
        return self._conclude_generation(cases, "targets")


def _find_worst(layers: Sequence[Case], name: str) -> Case:
    """Return the worst case of several: one line says it for all layers."""
    worst = max(layers, key=lambda each: (not each.passed, _relative_error(each)))
    return worst.model_copy(update={"output": name} if worst.passed else {})


def _store(outputs: dict[str, Tensor] | str) -> Given:
    return outputs if isinstance(outputs, str) else store_large(outputs)


def _decode(folder: Path, texts: list[list[int]]) -> list[str]:
    """Tokens as text, or as numbers if the folder has no tokenizer."""
    try:
        tokenizer = load_tokenizer(folder)
    except UserError:
        return [" ".join(map(str, ids)) for ids in texts]
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]


def _make_feed(case: TextCase) -> dict[str, Tensor]:
    segments = {} if case.segments is None else {"token_type_ids": case.segments}
    return complete_inputs({"input_ids": case.ids, "attention_mask": case.keep.long()} | segments)


def _relative_error(case: Case) -> float:
    """Return the largest difference in units of the largest output."""
    if case.max_abs is None:
        return math.inf
    return case.max_abs / case.largest if case.largest else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
