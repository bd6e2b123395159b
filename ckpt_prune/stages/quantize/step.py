"""The work of the stage `quantize`: choose the weights, and round those of one block after the other."""

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.versions import versions
from ckpt_prune.job.cost import cost_of
from ckpt_prune.job.form import Form
from ckpt_prune.job.layout import Layout, Output
from ckpt_prune.job.model_card import source_card
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import Source
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.inverse import OrderedFactor, factorise_largest_first
from ckpt_prune.sparsity.zeros import weights_by_module
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
_COLLECT = "calibrate with --collect moments,gram,linears"


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
        raise UserError(f"{prepared.statistics.folder} has no Grams of the inputs of all linear weights: {_COLLECT}")
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


class QuantizeStep(Step):
    """Rounds the weights of a block to nearest, or by GPTQ if there are statistics."""

    record = RoundedWeight
    apart = True

    def __init__(self, chosen: ChosenWeights, prepared: Prepared) -> None:
        self.chosen, self._weights = chosen, set(chosen.names)
        self._factors = None if prepared.statistics is None else GramFactors(prepared.model, prepared.statistics)

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[BaseModel]]:
        new: dict[str, Tensor] = {}
        rounded: list[BaseModel] = []
        for name, tensor in tensors.items():
            if name not in self._weights:
                new[name] = tensor
                continue
            gram = None if self._factors is None else self._factors.of(block, name)
            packed, change = pack_weight(name.removesuffix(_WEIGHT), tensor, self.chosen.scheme, gram)
            energy = float(tensor.double().square().sum())
            rounded.append(RoundedWeight(weight=name, error=change / energy if energy else 0.0))
            new |= packed
        return new, rounded


class GramFactors:
    """Factors that GPTQ rounds weights by: of the Grams of their inputs, from statistics. One block's are held."""

    def __init__(self, model: Model, statistics: Statistics) -> None:
        self._model, self._statistics = model, statistics
        self._block, self._factors = -1, dict[str, OrderedFactor]()

    def of(self, block: int, weight: str) -> OrderedFactor:
        """Return the factor of the damped Gram of a weight's inputs; refuse statistics without one."""
        if block != self._block:
            self._block, self._factors = block, {}
        model = self._model
        first = next(
            first
            for first, modules in model.family.inputs.items()
            if weight in {model.tensor(block, module) for module in modules}
        )
        name = model.moments_name(block, first)
        if name not in self._factors:
            folds = self._statistics.read_moments(block, {name}).get(name)
            moments = sum_folds(folds) if folds else None
            if not isinstance(moments, Moments) or moments.gram is None:
                raise UserError(f"{self._statistics.folder} has no Gram of the inputs of {weight}: {_COLLECT}")
            self._factors[name] = factorise_largest_first(moments.gram, DAMP, MOST_DAMP)
        return self._factors[name]


def _make_record(prepared: Prepared, records: Mapping[str, Sequence[Any]], run: Run) -> QuantizationRecord:
    checkpoint, step = prepared.model.checkpoint, run.steps[Quantize.key]
    assert isinstance(step, QuantizeStep)
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
        format=step.chosen.scheme.format,
        group_size=step.chosen.scheme.group_size,
        rounding="nearest" if prepared.statistics is None else "gptq",
        statistics=None if prepared.statistics is None else prepared.statistics.index.digest,
        before=sum(info.nbytes for info in checkpoint.tensors.values()),
        after=sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, shape in shapes),
        weights=[rounded[name] for name in step.chosen.names],
        report=None if report is None else report.data(),
    )


QUANTIZED = Form(find_record, _make_record, QUANTISATION_KIND, make_card)
