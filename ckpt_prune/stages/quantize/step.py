"""The work of the stage `quantize`: choose the weights, and round those of one block after the other."""

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.common.versions import versions
from ckpt_prune.job.cost import cost_of
from ckpt_prune.job.form import Form
from ckpt_prune.job.layout import Layout, Output
from ckpt_prune.job.model_card import source_card
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import Source
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import PruneStep, Tensors
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.model import Model
from ckpt_prune.model.packed import unpack_weights
from ckpt_prune.model.skeleton import Names
from ckpt_prune.parallel.group import process_group
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.inverse import factorise_largest_first
from ckpt_prune.sparsity.zeros import weights_by_module
from ckpt_prune.stages.moments import open_moments
from ckpt_prune.stages.quantize.packing import (
    pack_weight,
    packed_shapes,
    packed_skeleton,
    packing_config,
    require_library,
)
from ckpt_prune.stages.quantize.record import (
    QUANTISATION_KIND,
    QuantizationRecord,
    RoundedWeight,
    find_record,
    make_card,
)
from ckpt_prune.stages.quantize.scheme import PackingScheme, choose_scheme
from ckpt_prune.stages.quantize.stage import Quantize
from ckpt_prune.stages.report import find_report

_WEIGHT = ".weight"


@dataclass(frozen=True)
class ChosenWeights:
    """Weights of a checkpoint that are quantised, and how.

    Attributes:
        names: in the order of the files.
        ignored: names of the other linear modules.
    """

    names: tuple[str, ...]
    ignored: tuple[str, ...]
    scheme: PackingScheme


def choose_weights(stage: Quantize, prepared: Prepared) -> ChosenWeights:
    """Choose the weights to quantise, those of linear modules of the blocks, and refuse what cannot be loaded later.

    Refused are a missing library, groups that do not divide a weight, and a model whose linear modules transformers
    would not find under the names in its files.
    """
    require_library()
    checkpoint, family = prepared.model.checkpoint, prepared.model.family
    if prepared.model.has_remote_code:
        raise UserError(
            f"{checkpoint.path} needs code of its own, which runtimes of quantised weights do not run: prune with "
            "widths: uniform (recipe best-uniform)"
        )
    if checkpoint.stacks or family.experts is not None:
        raise UserError(f"{checkpoint.path}: experts are no linear modules in transformers, so they are not quantised")
    if checkpoint.transposed:
        raise UserError(
            f"{checkpoint.path} is a {family.model_type}, whose Conv1D modules transformers does not quantise"
        )
    parameter_names = stored_container(checkpoint).names()
    weights = [
        name
        for names in weights_by_module(checkpoint.tensors, family.block, family.linears).values()
        for name in names
        if checkpoint.tensors[name].numel
    ]
    ordered = tuple(name for name in checkpoint.tensors if name in set(weights))
    _check_names(weights, parameter_names, checkpoint)
    scheme = choose_scheme(stage.format, stage.group_size, {n: checkpoint.tensors[n].shape[1] for n in ordered})
    modules = {name.removesuffix(_WEIGHT) for name in ordered}
    linears = [name for name, module in parameter_names.model.named_modules() if isinstance(module, nn.Linear)]
    ignored = tuple(name for name in linears if name not in modules)
    _check_loads(stored_container(checkpoint).skeleton(), scheme, ignored, checkpoint)
    if prepared.statistics is not None and not {"gram", "linears"} <= set(prepared.statistics.index.collect):
        raise UserError(
            f"{prepared.statistics.folder} has no Grams of the inputs of all linear weights: calibrate with --collect "
            "moments,gram,linears"
        )
    return ChosenWeights(ordered, ignored, scheme)


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


def lay_out(stage: Quantize, prepared: Prepared) -> Prepared:
    """Return the job with its output: the source's files, with packed tensors in place of the weights."""
    chosen, model = choose_weights(stage, prepared), prepared.model
    checkpoint, weights = model.checkpoint, set(chosen.names)
    layout: Layout = {file: {} for file in checkpoint.files}
    for name, info in checkpoint.tensors.items():
        if name in weights:
            rows, columns = info.shape
            layout[info.file] |= packed_shapes(name.removesuffix(_WEIGHT), (rows, columns), chosen.scheme, info.dtype)
        else:
            layout[info.file][name] = (info.dtype, info.shape)
    packing = packing_config(chosen.scheme, list(chosen.ignored)).model_dump(mode="json", exclude_none=True)
    container = stored_container(checkpoint)
    container = replace(container, config=checkpoint.config | {QUANTISATION_KEY: packing})
    return replace(prepared, planned=Output(container, layout, cost_of(model)))


def quantize_step(stage: Quantize, prepared: Prepared) -> PruneStep:
    """Return the step that rounds the weights of a block, at the first block."""
    by_gptq = stage.rounding == "gptq"
    rounder = Rounder(prepared.model, choose_weights(stage, prepared), by_gptq)
    grams = dict.fromkeys(prepared.model.family.inputs, True) if by_gptq else None
    with phase("calibration"):
        return PruneStep(rounder, open_moments(prepared, grams))


class Rounder:
    """Rounds the weights of a block, by GPTQ or to nearest."""

    record = RoundedWeight

    def __init__(self, model: Model, chosen: ChosenWeights, by_gptq: bool) -> None:
        self.chosen, self._model, self._by_gptq = chosen, model, by_gptq

    def block(self, block: int, tensors: Tensors, source: MomentSource) -> tuple[Tensors, list[BaseModel]]:
        """Round one block, one group of linear modules that read the same input after the other.

        Returns:
            The block's tensors with packed ones in place of weights, and what rounding has changed.
        """
        new, rounded = dict(tensors), dict[str, BaseModel]()
        readers = self._model.family.inputs
        for keys in source.group_keys(list(readers)):
            with phase("calibration"):
                moments = source.moments(block, unpack_weights(new), keys)
            for first in keys:
                names = [self._model.tensor(block, module) for module in readers[first]]
                names = [name for name in names if name in tensors and name in self.chosen.names]
                # Of several processes, the first one has the moments.
                for name, (packed, record) in (
                    process_group()
                    .once(partial(self._round, {name: tensors[name] for name in names}, moments.get(first)))
                    .items()
                ):
                    del new[name]
                    new |= packed
                    rounded[name] = record
        return new, [rounded[name] for name in tensors if name in rounded]

    def _round(
        self, weights: Tensors, moments: SpaceMoments | None
    ) -> dict[str, tuple[dict[str, Tensor], RoundedWeight]]:
        """Round weights that read the same input. Return the tensors that stand in for each, and its record."""
        folds = select_input_moments(moments)
        gram = sum_folds(folds).gram if folds else None
        if self._by_gptq and gram is None:
            raise UserError(f"there is no Gram of the inputs of {' and '.join(weights)}: calibrate again")
        factor = None if gram is None else factorise_largest_first(gram, DAMP, MOST_DAMP)
        rounded = {}
        with phase("compensation"):
            for name, weight in weights.items():
                packed, change = pack_weight(name.removesuffix(_WEIGHT), weight, self.chosen.scheme, factor)
                energy = float(weight.double().square().sum())
                rounded[name] = packed, RoundedWeight(weight=name, error=change / energy if energy else 0.0)
        return rounded


def _make_record(prepared: Prepared, records: Mapping[str, Sequence[Any]], run: Run) -> QuantizationRecord:
    checkpoint, step, live = prepared.model.checkpoint, run.steps[Quantize.key], prepared.live
    assert isinstance(step, PruneStep)
    assert isinstance(step.pruner, Rounder)
    chosen = step.pruner.chosen
    rounded = {weight.weight: weight for weight in records[Quantize.key]}
    shapes = [shape for tensors in prepared.output.layout.values() for shape in tensors.values()]
    report, used = find_report(checkpoint.path), versions()
    return QuantizationRecord(
        ckpt_prune=used["ckpt_prune"],
        torch=used["torch"],
        transformers=used["transformers"],
        compressed_tensors=str(require_library().__version__),
        source=Source(name=checkpoint.name, fingerprint=checkpoint.fingerprint, card=source_card(checkpoint.path)),
        auto_class=prepared.model.family.loading_class,
        format=chosen.scheme.format,
        group_size=chosen.scheme.group_size,
        rounding="gptq" if prepared.recipe.needs_moments else "nearest",
        statistics=None if prepared.statistics is None else prepared.statistics.index.digest,
        samples=None if live is None else len(live.samples),
        sample_digest=None if live is None else live.samples.fingerprint,
        before=sum(info.nbytes for info in checkpoint.tensors.values()),
        after=sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, shape in shapes),
        weights=[rounded[name] for name in chosen.names],
        report=None if report is None else report.data(),
    )


QUANTIZED = Form(find_record, _make_record, QUANTISATION_KIND, make_card)
