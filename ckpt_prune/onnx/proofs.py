"""The checks of an exported graph, one after the other: files, interface, outputs, generation, the task's metric."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import format_distinctly
from ckpt_prune.evaluation.batches import check_windows
from ckpt_prune.evaluation.whole_model import reads_causally
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.cases import (
    IMAGE_BATCHES,
    STEPS,
    Padding,
    TextCase,
    chunk_cases,
    image_batches,
    noise_pixels,
    noise_windows,
    prompts,
    text_cases,
)
from ckpt_prune.onnx.differences import difference, positions
from ckpt_prune.onnx.integrity import check_files, check_interface, check_operators, present_files
from ckpt_prune.onnx.manifest import Manifest, Port
from ckpt_prune.onnx.metrics import MEAN_SHARE, Allowance, Metric, image_metric, text_metric
from ckpt_prune.onnx.outcome import Case, CheckName, Continuation, Place, ProofCheck, ProofSamples
from ckpt_prune.onnx.reference import Reference
from ckpt_prune.onnx.session import OnnxModel, Provider, complete, next_cache
from ckpt_prune.onnx.tasks import PAST, PRESENT
from ckpt_prune.onnx.tracing import image_size
from ckpt_prune.verification.verify import run_check

PROMPT, SAID = 16, 32
"""Tokens of a text that is continued, and tokens that are said after it."""
MOST_NOISE = 64
"""Tokens of a window where there is no text."""


Other = tuple[str, Reference, float | None]
"""Another model: its name, itself, and what the graph may lose of its metric."""
Measure = Callable[[Reference, Allowance], Metric | str]
"""The task's metric of a graph and of a model beside it, or why there is none."""


class Proof:
    """The checks, in order; what needs an earlier one that failed is skipped.

    Args:
        folder: of the graph.
        manifest: its record.
        reference: the model.
        samples: what both are run on.
        allowance: how far outputs may be apart, or how much the metric may lose.
        others: models that the metric is compared with as well.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reference: Reference,
        samples: ProofSamples,
        allowance: Allowance,
        others: Sequence[Other] = (),
    ) -> None:
        self.others = others
        self.folder, self.manifest, self.reference, self.samples = folder, manifest, reference, samples
        self.allowance, self.tolerance = allowance, allowance.tolerance
        self.present = present_files(folder, manifest)
        self.ports = {port.name: port for port in manifest.outputs}
        self.graph: OnnxModel | None = None
        self.checks: list[ProofCheck] = []
        self.cases: list[Case] = []
        self.metrics: list[Metric] = []
        self.continuations: list[Continuation] = []

    def run(self, provider: Provider) -> None:
        """Make all checks."""
        self._check("files", lambda: check_files(self.folder, self.manifest, self.present))
        self._check("checker", lambda: check_operators(self.folder, self.manifest))
        sound = self._check("interface", self._interface)
        loaded = self._check("load", lambda: self._load(provider))
        why = "it does not load" if not loaded else "inputs or outputs are not the model's"
        later: list[tuple[CheckName, Callable[[], tuple[bool | None, str]]]] = [("outputs", self._outputs)]
        if self.manifest.cached:
            later.append(("generation", self._generation))
        for name, check in [*later, ("metric", self._metric)]:
            if name == "metric" and any(case.max_abs is None and case.where is None for case in self.cases):
                sound, why = False, "there are outputs that cannot be compared"
            if sound and loaded:
                self._check(name, check)
            else:
                self.checks.append(ProofCheck(name=name, passed=None, detail=f"not run: {why}"))

    def _check(self, name: CheckName, check: Callable[[], tuple[bool | None, str]]) -> bool:
        done = run_check(name, check)
        self.checks.append(ProofCheck(name=name, passed=done.passed, detail=done.detail))
        return done.passed is not False

    def _interface(self) -> tuple[bool, str]:
        raise NotImplementedError

    def _outputs(self) -> tuple[bool, str]:
        raise NotImplementedError

    def _generation(self) -> tuple[bool, str]:
        raise NotImplementedError

    def _metric(self) -> tuple[bool | None, str]:
        raise NotImplementedError

    def _judged(self, measure: Measure) -> tuple[bool | None, str]:
        """The task's metric beside the model's, and beside that of each other model."""
        metrics, passed, said = judged(measure, self.reference, self.allowance, self.others)
        self.metrics += metrics
        return passed, said

    def _gone(self) -> list[str]:
        """Inputs that the model's outputs depend on and the graph does not have."""
        there = {port.name for port in self.manifest.inputs}
        return [name for name in self.reference.needs if name not in there and self.reference.heeds(name)]

    def _load(self, provider: Provider) -> tuple[bool, str]:
        try:
            self.graph = OnnxModel(self.folder, self.manifest.file, provider=provider)
        except UserError:
            raise
        except Exception as error:  # transformers raises anything over a damaged config.json
            raise UserError(f"config.json: {' '.join(str(error).split())[:300]}") from error
        ours, recorded = list(self.graph.outputs), list(self.ports)
        if ours != recorded or list(self.graph.inputs) != [port.name for port in self.manifest.inputs]:
            return False, f"{self.manifest.file} has inputs and outputs that its record does not name"
        return True, f"onnxruntime, {self.graph.session.provider.upper()}"

    def _run(self, feed: dict[str, Tensor]) -> dict[str, Tensor] | str:
        """What comes out of the graph, or why nothing does."""
        assert self.graph is not None
        try:
            return self.graph.run(feed)
        except UserError as error:
            return str(error)

    def _compare(
        self,
        given: dict[str, Tensor] | str,
        expected: dict[str, Tensor],
        *,
        padding: Padding = "none",
        keep: Tensor | None = None,
        cache: Literal["none", "chunks", "steps"] = "none",
        segments: bool = False,
    ) -> list[Case]:
        """A case for each output that PyTorch returns too, or for the main one where onnxruntime failed.

        Args:
            given: of onnxruntime, or what it said.
            expected: of PyTorch, (B, ...), of a text's tokens (B, T, ...).
            padding: of the input.
            keep: bool (B, T), false where a token is padding; None for images.
            cache: how the text was read.
            segments: whether it was in two.
        """
        batch = len(next(iter(expected.values())))
        tokens = None if keep is None else keep.shape[1]
        about: dict[str, Any] = {"batch": batch, "tokens": tokens, "padding": padding, "cache": cache}
        about["segments"] = segments
        if isinstance(given, str):
            return [Case(**about, output=next(iter(expected)), passed=False, note=given)]
        return [
            self._case(about, self.ports[name], given[name], theirs, keep)
            for name, theirs in expected.items()
            if name in given
        ]

    def _case(self, about: dict[str, Any], port: Port, ours: Tensor, theirs: Tensor, keep: Tensor | None) -> Case:
        about = about | {"output": port.name}
        if ours.shape != theirs.shape:
            return Case(
                **about, passed=False, note=f"{list(ours.shape)} in onnxruntime, {list(theirs.shape)} in PyTorch"
            )
        if port.name.startswith(PRESENT):  # (B, heads, T, head_dim)
            ours, theirs = ours.movedim(2, 1), theirs.movedim(2, 1)
        elif self.manifest.modality == "image" and ours.dim() > 2:  # patches, none of them padding
            keep = torch.ones(ours.shape[:2], dtype=torch.bool)
        elif len(port.shape) < 2 or isinstance(port.shape[1], int):  # of a whole text or image
            keep = None
        a, b = positions(ours, keep), positions(theirs, keep)
        found = difference(a, b, classes=_is_classes(port.name, self.manifest.task))
        if self.allowance.rounded:
            passed = math.isfinite(found.max_abs)
        else:
            limit = self.tolerance * found.largest
            passed = found.max_abs <= limit and found.mean_abs <= limit * MEAN_SHARE
        case = Case(
            **about,
            max_abs=_finite(found.max_abs),
            mean_abs=_finite(found.mean_abs),
            max_rel=_finite(found.max_rel),
            mean_rel=_finite(found.mean_rel),
            largest=found.largest,
            agreement=found.agreement,
            passed=passed,
        )
        if passed:
            return case
        position, unit = found.worst
        row, token = (position, None) if keep is None else map(int, keep.nonzero()[position])
        values = a[position, unit].item(), b[position, unit].item()
        case.where = Place(
            batch=row, token=token, unit=unit, onnxruntime=_finite(values[0]), pytorch=_finite(values[1])
        )
        if not math.isfinite(values[1]):
            case.note = "PyTorch's own output is no finite number there: the model is damaged, or overflows in float32"
        elif not math.isfinite(values[0]):
            case.note = f"onnxruntime's output is {values[0]} there"
            if self.manifest.float_type == "float16":
                case.note += ": float16 holds no more than 65504"
        return case

    def _verdict(self, cases: Iterable[Case], what: str) -> tuple[bool, str]:
        """Keep cases, and say whether all of them passed."""
        new = list(cases)
        self.cases += new
        failed = [case for case in new if not case.passed]
        if self.allowance.rounded:
            if failed:
                return False, f"{len(failed)} of {len(new)} {what} are not finite, or not of PyTorch's shape"
            return True, f"{len(new)} {what} are finite and of PyTorch's shape; rounded, they are held to no tolerance"
        if failed:
            return False, f"{len(failed)} of {len(new)} {what} are outside the tolerance of {self.tolerance:g}"
        most = max(map(_share, new))
        return True, f"{len(new)} {what} within {self.tolerance:g}: at most {most:.1e} of the largest output"


def judged(
    measure: Measure, reference: Reference, allowance: Allowance, others: Sequence[Other]
) -> tuple[list[Metric], bool | None, str]:
    """A task's metric beside the model's, and beside that of each other model.

    Returns:
        The figures; whether they are within what is allowed, None where there are none; and both in words.
    """
    found = measure(reference, allowance)
    if isinstance(found, str):
        return [], None, found
    metrics, said, passed = [found], [_apart(found)], found.passed
    for name, other, most in others:
        beside = measure(other, Allowance(0.0, math.inf if most is None else most))
        if isinstance(beside, Metric):
            beside = beside.model_copy(
                update={"against": name, "tolerance": most, "passed": most is None or beside.passed}
            )
            metrics.append(beside)
            said.append(f"{_apart(beside)} of {name}")
            passed = passed and beside.passed
    return metrics, passed, "; ".join(said)


class ImageProof(Proof):
    """The checks of a graph that reads images."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reference: Reference,
        samples: ProofSamples,
        allowance: Allowance,
        others: Sequence[Other] = (),
    ) -> None:
        super().__init__(folder, manifest, reference, samples, allowance, others)
        config, images = reference.model.config, samples.images
        self.size = (getattr(config, "num_channels", 3), *image_size(config))
        if images is None:
            self.pixels = noise_pixels(self.size, samples.seed)
            return
        if images.size != self.size:
            made, read = (" x ".join(map(str, size)) for size in (images.size, self.size))
            raise UserError(f"the images are {made} after preprocessing, the model reads {read}")
        self.pixels = images.batch(slice(max(IMAGE_BATCHES)))["pixel_values"]

    def _interface(self) -> tuple[bool, str]:
        found = [self.reference.run({"pixel_values": torch.zeros(batch, *self.size)}) for batch in (2, 3)]
        return check_interface(self.folder, self.manifest, _shapes(found), {}, self.size, self._gone())

    def _outputs(self) -> tuple[bool, str]:
        cases: list[Case] = []
        for pixels in image_batches(self.pixels):
            feed = {"pixel_values": pixels}
            expected = self.reference.run(feed)
            cases += self._compare(self._run(feed), expected)
        return self._verdict(cases, "outputs")

    def _metric(self) -> tuple[bool | None, str]:
        assert self.graph is not None
        if self.samples.images is None:
            return None, "not measured on noise: give --images"
        graph, images, task = self.graph, self.samples.images, self.manifest.task
        return self._judged(lambda reference, allowance: image_metric(graph, reference, task, images, allowance))


class TextProof(Proof):
    """The checks of a graph that reads text."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reference: Reference,
        samples: ProofSamples,
        allowance: Allowance,
        others: Sequence[Other] = (),
    ) -> None:
        super().__init__(folder, manifest, reference, samples, allowance, others)
        config = reference.model.config.get_text_config()
        self.context: int | None = context_length(config)
        if samples.windows is None:
            window = MOST_NOISE if self.context is None else min(MOST_NOISE, self.context)
            self.windows = noise_windows(config.vocab_size, window, samples.seed)
        else:
            self.windows = samples.windows
            check_windows(reference.model, self.windows)
        pad = getattr(config, "pad_token_id", None)
        self.pad = pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else 0

    def _interface(self) -> tuple[bool, str]:
        feeds = [complete({"input_ids": torch.ones(size, dtype=torch.int64)}) for size in ((2, 2), (3, 3))]
        cache = _shapes([self.reference.cache(feed) for feed in feeds]) if self.manifest.cached else {}
        found = [self.reference.run(feed) for feed in feeds]
        return check_interface(self.folder, self.manifest, _shapes(found), cache, None, self._gone())

    def _outputs(self) -> tuple[bool, str]:
        cases: list[Case] = []
        left = self.manifest.task == "text-generation" or reads_causally(self.reference.model.config.to_dict())
        for case in text_cases(self.windows, pad=self.pad, left=left, segments=self.reference.segments > 1):
            expected = self.reference.run(_feed(case))
            given = self._run(_feed(case) | self._empty(case))
            two = case.segments is not None
            cases += self._compare(given, expected, padding=case.padding, keep=case.keep, segments=two)
        if self.manifest.cached:
            for case in chunk_cases(self.windows, pad=self.pad):
                cases += self._chunks(case)
        return self._verdict(cases, "outputs")

    def _chunks(self, case: TextCase) -> list[Case]:
        """A text through the cache in pieces, against one pass in PyTorch: outputs, and the keys and values kept."""
        expected = self.reference.run(_feed(case))
        kept = self.reference.cache(_feed(case))
        given = self._in_pieces(case, expected)
        cases = self._compare(given, expected, padding=case.padding, keep=case.keep, cache="chunks")
        if isinstance(given, str):
            return cases
        layers = self._compare(given, kept, padding=case.padding, keep=case.keep, cache="chunks")
        # One line says it for all layers: the worst.
        worst = max(layers, key=lambda each: (not each.passed, _share(each)))
        return [*cases, worst.model_copy(update={"output": PRESENT + "*"} if worst.passed else {})]

    def _in_pieces(self, case: TextCase, names: Iterable[str]) -> dict[str, Tensor] | str:
        cache, pieces, start = self._empty(case), [], 0
        for size in case.chunks:
            end = start + size
            feed = {"input_ids": case.ids[:, start:end], "attention_mask": case.keep[:, :end].long()}
            found = self._run(complete(feed) | cache)
            if isinstance(found, str):
                return found
            cache = next_cache(found)
            pieces.append(found)
            start = end
        joined = {name: torch.cat([piece[name] for piece in pieces], 1) for name in names if name in pieces[0]}
        return joined | {name.replace(PAST, PRESENT, 1): value for name, value in cache.items()}

    def _generation(self) -> tuple[bool, str]:
        cases: list[Case] = []
        for case in prompts(self.windows, pad=self.pad, context=self.context):
            length = case.ids.shape[1]
            # The last token is chosen, not read.
            steps = STEPS if self.context is None else min(STEPS, self.context - length + 1)
            cache, failed = self._empty(case), ""
            ours, theirs = [], []
            for feed, expected in self.reference.generate(case.ids, case.keep.long(), steps):
                theirs.append(expected)
                found = failed or self._run(feed | cache)
                if isinstance(found, str):
                    failed = found
                else:
                    cache = next_cache(found)
                    ours.append(found["logits"][:, -1])
            given = failed or {"logits": torch.stack(ours, 1)}
            keep = torch.ones(len(case.ids), steps, dtype=torch.bool)
            compared = self._compare(
                given, {"logits": torch.stack(theirs, 1)}, padding=case.padding, keep=keep, cache="steps"
            )
            for each in compared:
                each.tokens = length + steps
            cases += compared
        passed, detail = self._verdict(cases, "texts")
        if self.allowance.rounded and self.samples.windows is not None and not failed:
            self._continue()
        same = [case.agreement for case in cases if case.agreement is not None]
        return passed, f"{detail}; {min(same, default=0.0):.1%} of the tokens are the same"

    def _continue(self) -> None:
        """Let both continue a text, each by what it says itself: rounding errors add up in words."""
        ids = self.windows[:1, : min(PROMPT, self.windows.shape[1])]
        room = SAID if self.context is None else min(SAID, self.context - ids.shape[1])
        if room < 1:
            return
        theirs = [last.argmax(-1).item() for _, last in self.reference.generate(ids, torch.ones_like(ids), room)]
        ours, cache, new, read = [], self.graph.empty_cache(1) if self.graph else {}, ids, ids
        for _ in range(room):
            found = self._run(complete({"input_ids": new, "attention_mask": torch.ones_like(read)}) | cache)
            if isinstance(found, str):
                return
            new, cache = found["logits"][:, -1:].argmax(-1), next_cache(found)
            read = torch.cat([read, new], 1)
            ours.append(int(new))
        same = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), room)
        shown = _shown(self.folder, [ids[0].tolist(), ours, [int(token) for token in theirs]])
        self.continuations.append(
            Continuation(prompt=shown[0], onnxruntime=shown[1], pytorch=shown[2], tokens=room, same=same)
        )

    def _metric(self) -> tuple[bool | None, str]:
        assert self.graph is not None
        if self.samples.windows is None:
            return None, "not measured on noise: give --text"
        graph, windows, task = self.graph, self.windows, self.manifest.task
        return self._judged(
            lambda reference, allowance: text_metric(graph, reference, task, windows, self.folder, allowance)
        )

    def _empty(self, case: TextCase) -> dict[str, Tensor]:
        assert self.graph is not None
        return self.graph.empty_cache(len(case.ids))


def _shown(folder: Path, texts: list[list[int]]) -> list[str]:
    """Tokens as text, or as numbers where the folder has no tokenizer."""
    try:
        tokenizer = load_tokenizer(folder)
    except UserError:
        return [" ".join(map(str, ids)) for ids in texts]
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]


def _feed(case: TextCase) -> dict[str, Tensor]:
    segments = {} if case.segments is None else {"token_type_ids": case.segments}
    return complete({"input_ids": case.ids, "attention_mask": case.keep.long()} | segments)


def _shapes(runs: list[dict[str, Tensor]]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [tuple(run[name].shape) for run in runs] for name in runs[0]}


def _is_classes(output: str, task: str) -> bool:
    """Whether an output is over tokens or classes; those of question-answering are over positions."""
    return output.endswith("logits") and task != "question-answering"


def _apart(metric: Metric) -> str:
    found, allowed = metric.difference, metric.tolerance
    if found is None:
        return f"{metric.name}: not finite apart" + ("" if allowed is None else f", {allowed:.1e} allowed")
    if allowed is None:
        return f"{metric.name}: {found:.1e} apart"
    apart, most = format_distinctly(found, allowed, "e", 1)
    return f"{metric.name}: {apart} apart, {most} allowed"


def _share(case: Case) -> float:
    """The largest difference in units of the largest output."""
    if case.max_abs is None:
        return math.inf
    return case.max_abs / case.largest if case.largest else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
