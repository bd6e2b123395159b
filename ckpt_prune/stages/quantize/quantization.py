"""Write a checkpoint with weights of few bits, one tensor at a time."""

from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.folder_kinds import WEIGHT_NAMES
from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY
from ckpt_prune.checkpoint.staging import Staging, refuse_overlap
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import QUANTISED_RECORD
from ckpt_prune.common.progress import track
from ckpt_prune.common.versions import versions
from ckpt_prune.job.report import Source
from ckpt_prune.job.report_file import report_of
from ckpt_prune.job.source_card import CARD, source_card
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.containers.checking import check_stored
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.containers.remote import remote_class
from ckpt_prune.model.containers.side_files import carried_files, top_names
from ckpt_prune.model.family import Family
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.inverse import factorise
from ckpt_prune.sparsity.zeros import weights_by_module
from ckpt_prune.stages.quantize.card import make_card
from ckpt_prune.stages.quantize.packing import (
    pack_weight,
    packed_shapes,
    packed_skeleton,
    packing_config,
    require_library,
)
from ckpt_prune.stages.quantize.record import QUANTISATION_KIND, QuantizationRecord, RoundedWeight
from ckpt_prune.stages.quantize.scheme import Format, PackingScheme, choose_scheme

_WEIGHT = ".weight"
_COLLECT = "calibrate with --collect moments,gram,linears"


@dataclass(frozen=True)
class Quantization:
    """Weights of a checkpoint that are quantised, and how.

    Attributes:
        weights: names, in the order of the files.
        ignored: names of the other linear modules.
        hessians: to round by (GPTQ), or None.
    """

    checkpoint: Checkpoint
    family: Family
    weights: tuple[str, ...]
    ignored: tuple[str, ...]
    scheme: PackingScheme
    hessians: "Hessians | None" = None

    @property
    def layout(self) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """Files, tensors, types and shapes of the output: the source's files, with others in place of the weights."""
        files: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {name: {} for name in self.checkpoint.files}
        weights = set(self.weights)
        for name, info in self.checkpoint.tensors.items():
            if name in weights:
                rows, columns = info.shape
                module = name.removesuffix(_WEIGHT)
                files[info.file] |= packed_shapes(module, (rows, columns), self.scheme, info.dtype)
            else:
                files[info.file][name] = (info.dtype, info.shape)
        return files


class Hessians:
    """Factors that GPTQ rounds weights by, each held until its last weight is rounded.

    They are of the Grams of the weights' inputs, from statistics of the model; every weight is rounded once.
    """

    def __init__(self, model: Model, weights: Iterable[str], statistics: Statistics) -> None:
        self._statistics = statistics
        self._moments = {
            model.tensor(block, module): (block, model.moments_name(block, first))
            for block in range(model.blocks)
            for first, modules in model.family.inputs.items()
            for module in modules
        }
        self._uses_left = Counter(self._moments[weight] for weight in weights)
        self._factors: dict[tuple[int, str], Tensor] = {}

    @property
    def digest(self) -> str:
        """Digest of the statistics."""
        return self._statistics.index.digest

    def factor(self, weight: str) -> Tensor:
        """Return the factor of the damped Gram of a weight's inputs (`factorise`); refuse statistics without one."""
        key = block, name = self._moments[weight]
        if key not in self._factors:
            folds = self._statistics.read_moments(block, {name}).get(name)
            moments = sum_folds(folds) if folds else None
            if not isinstance(moments, Moments) or moments.gram is None:
                raise UserError(f"{self._statistics.folder} has no Gram of the inputs of {weight}: {_COLLECT}")
            self._factors[key] = factorise(moments.gram, moments.gram.diagonal() == 0, DAMP, MOST_DAMP)[0]
        self._uses_left[key] -= 1
        return self._factors[key] if self._uses_left[key] else self._factors.pop(key)


def plan_quantization(
    checkpoint: Checkpoint, kind: Format, group_size: str | None, statistics: Path | None = None
) -> Quantization:
    """Choose the weights to quantise, those of linear modules of the blocks, and refuse what cannot be loaded later.

    Refused are a missing library, groups that do not divide a weight, and a model whose linear modules transformers
    would not find under the names in its files.
    """
    require_library()
    if remote_class(checkpoint.config, checkpoint.path) is not None:
        raise UserError(
            f"{checkpoint.path} needs code of its own, which runtimes of quantised weights do not run: prune with "
            "widths: uniform (recipe best-uniform)"
        )
    checkpoint, family = match_checkpoint(checkpoint)
    if checkpoint.stacks or family.experts is not None:
        raise UserError(f"{checkpoint.path}: experts are no linear modules in transformers, so they are not quantised")
    if checkpoint.transposed:
        raise UserError(
            f"{checkpoint.path} is a {family.model_type}, whose Conv1D modules transformers does not quantise"
        )
    parameter_names = stored_container(checkpoint).names()
    check_stored(checkpoint, parameter_names)
    weights = [
        name
        for names in weights_by_module(checkpoint.tensors, family.block, family.linears).values()
        for name in names
        if checkpoint.tensors[name].numel
    ]
    _check_names(weights, parameter_names, checkpoint)
    ordered = tuple(name for name in checkpoint.tensors if name in set(weights))
    scheme = choose_scheme(kind, group_size, {name: checkpoint.tensors[name].shape[1] for name in ordered})
    modules = {name.removesuffix(_WEIGHT) for name in ordered}
    linears = [name for name, module in parameter_names.model.named_modules() if isinstance(module, nn.Linear)]
    ignored = tuple(name for name in linears if name not in modules)
    _check_loads(stored_container(checkpoint).skeleton(), scheme, ignored, checkpoint)
    hessians = None if statistics is None else _hessians(checkpoint, ordered, statistics)
    return Quantization(checkpoint, family, ordered, ignored, scheme, hessians)


def _hessians(checkpoint: Checkpoint, weights: Iterable[str], folder: Path) -> Hessians:
    """Open statistics of this very model."""
    statistics, model = Statistics(folder), Model.of(checkpoint)
    statistics.check_model(model)
    if not {"gram", "linears"} <= set(statistics.index.collect):
        raise UserError(f"{folder} has no Grams of the inputs of all linear weights: {_COLLECT}")
    return Hessians(model, weights, statistics)


def _check_loads(model: Any, scheme: PackingScheme, ignored: tuple[str, ...], checkpoint: Checkpoint) -> None:
    """Refuse a class that reads weights while it is loaded, if it has only packed ones: on the meta device."""
    try:
        with redirect_stderr(StringIO()):
            packed_skeleton(model, scheme, list(ignored))
            for module in model.modules():
                model._init_weights(module)
    except AttributeError as error:
        raise UserError(
            f"{checkpoint.path}: transformers' {type(model).__name__} cannot be loaded with packed weights ({error})"
        ) from error


def _check_names(weights: list[str], names: Names, checkpoint: Checkpoint) -> None:
    """Refuse weights that transformers would not find: it looks for the linear modules of its own model by name."""
    modules = dict(names.model.named_modules())
    for name in weights:
        if names.parameters(name) != (name,) or type(modules.get(name.removesuffix(_WEIGHT))) is not nn.Linear:
            raise UserError(
                f"{checkpoint.path}: transformers holds {name} under another name, or not as a linear module, and "
                "would not find it quantised"
            )
    if not weights:
        raise UserError(f"{checkpoint.path} has no linear weights in its blocks that could be quantised")


def write_quantized(job: Quantization, out: Path, *, overwrite: bool = False) -> QuantizationRecord:
    """Write a quantised checkpoint. One tensor is in memory at a time, and what its rounding takes."""
    checkpoint = job.checkpoint
    kept = carried_files(checkpoint)
    wants = top_names(kept) | WEIGHT_NAMES | dict.fromkeys([*checkpoint.files, CONFIG, QUANTISED_RECORD, CARD])
    refuse_overlap(checkpoint.path, out)
    place = Staging(out, job="", overwrite=overwrite, kind=QUANTISATION_KIND, wants=wants)
    checkpoint.check_finite()
    layout, rounded = job.layout, []
    with place as staging:
        writer = CheckpointWriter(staging, layout, sharded=checkpoint.sharded)
        weights = set(job.weights)
        for name in track(list(checkpoint.tensors), "quantising", unit="tensor"):
            tensor = checkpoint.read([name])[name]
            if name not in weights:
                writer.write(name, tensor)
                continue
            factor = None if job.hessians is None else job.hessians.factor(name)
            packed, change = pack_weight(name.removesuffix(_WEIGHT), tensor, job.scheme, factor)
            energy = float(tensor.double().square().sum())
            rounded.append(RoundedWeight(weight=name, error=change / energy if energy else 0.0))
            for packed_name, value in packed.items():
                writer.write(packed_name, value)
        writer.commit("tensors")
        packing = packing_config(job.scheme, list(job.ignored)).model_dump(mode="json", exclude_none=True)
        writer.write_json(CONFIG, checkpoint.config | {QUANTISATION_KEY: packing})
        for name, path in kept.items():
            writer.copy(path, name)
        digests = sha256_files(writer.folder, dict.fromkeys([*checkpoint.files, CONFIG, *sorted(kept)]))
        carried_files(
            checkpoint
        )  # raises where one changed meanwhile: statistics were made with the tokenizer as it was
        record = _record(job, rounded, digests, sorted(writer.side_names - {CONFIG} | {QUANTISED_RECORD, CARD}), layout)
        writer.write_json(QUANTISED_RECORD, record.model_dump(mode="json"))
        writer.write_text(CARD, make_card(record))
        writer.finish()
    return record


def _record(
    job: Quantization,
    rounded: list[RoundedWeight],
    files: dict[str, str],
    side_files: list[str],
    layout: dict[str, Any],
) -> QuantizationRecord:
    checkpoint, report = job.checkpoint, report_of(job.checkpoint.path)
    after = 0
    for tensors in layout.values():
        for dtype, shape in tensors.values():
            after += torch.empty(shape, dtype=dtype, device="meta").nbytes
    card, used = source_card(checkpoint.path), versions()
    return QuantizationRecord(
        ckpt_prune=used["ckpt_prune"],
        torch=used["torch"],
        transformers=used["transformers"],
        compressed_tensors=str(require_library().__version__),
        source=Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint, card=card),
        auto_class=job.family.loading_class,
        format=job.scheme.format,
        group_size=job.scheme.group_size,
        rounding="nearest" if job.hessians is None else "gptq",
        statistics=None if job.hessians is None else job.hessians.digest,
        before=sum(info.nbytes for info in checkpoint.tensors.values()),
        after=after,
        weights=rounded,
        report=None if report is None else report.data(),
        files=files,
        side_files=side_files,
    )
