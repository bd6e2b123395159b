"""The work of the stage `quantize`: round the weights of one block after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.packed import unpack_weights
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.common.versions import versions
from ckpt_prune.job.form import Form
from ckpt_prune.job.layout import Output, layout_of
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import Source
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import PruneStep, Tensors
from ckpt_prune.measure.moment_sources import MomentSource
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.model.model import Model
from ckpt_prune.parallel.group import process_group
from ckpt_prune.show.model_card import source_card
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.inverse import factorise_largest_first
from ckpt_prune.stages.quantize.keys import Quantize, QuantizeAlone
from ckpt_prune.stages.quantize.output import check_model, pack_output, schemes_of
from ckpt_prune.stages.quantize.packing import pack_weight, require_library
from ckpt_prune.stages.quantize.records import (
    QUANTISATION_KIND,
    QuantizationRecord,
    QuantizedWeights,
    RoundedWeight,
    find_record,
    make_card,
)
from ckpt_prune.stages.quantize.scheme import Schemes
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.shared.moments import open_moments

_WEIGHT = ".weight"


def quantize_step(stage: Quantize, prepared: Prepared, run: Run) -> PruneStep:
    """Return the step that rounds the weights of a block, at the first block."""
    packed, by_gptq = prepared.output.packed, stage.rounding == "gptq"
    rounder = Rounder(prepared.model, schemes_of(stage, packed)[1], by_gptq)
    grams = dict.fromkeys(prepared.model.family.inputs, by_gptq)
    with phase("calibration"):
        if not by_gptq or prepared.live is None:
            return PruneStep(rounder, open_moments(prepared, grams if by_gptq else None))
        return PruneStep(rounder, run.prefix_moments(prepared, grams))


class Rounder:
    """Rounds the weights of a block, by GPTQ or to nearest."""

    record = RoundedWeight

    def __init__(self, model: Model, schemes: Schemes, by_gptq: bool) -> None:
        self._model, self.schemes, self._by_gptq = model, schemes, by_gptq

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
                names = [name for name in names if name in self.schemes and name in tensors]
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
                packed, change = pack_weight(name.removesuffix(_WEIGHT), weight, self.schemes[name], factor)
                energy = float(weight.double().square().sum())
                rounded[name] = packed, RoundedWeight(weight=name, error=change / energy if energy else 0.0)
        return rounded


def check_alone(stage: Quantize, prepared: Prepared) -> None:
    """Refuse a model that cannot be quantised, and statistics that lack Grams."""
    lay_out(stage, prepared)
    if prepared.statistics is not None and not {"gram", "linears"} <= set(prepared.statistics.index.collect):
        raise UserError(
            f"{prepared.statistics.folder} has no Grams of the inputs of all linear weights: calibrate with --collect "
            "moments,gram,linears"
        )


def check_samples(prepared: Prepared) -> None:
    """Refuse a job that prunes by statistics or a plan alone: inputs are measured behind the pruned blocks."""
    if prepared.live is None:
        raise UserError(
            f"recipe {prepared.recipe.name} rounds weights by what reaches them behind the pruned blocks: give "
            f"{DATA_OPTIONS[prepared.model.family.modality]} in place of --statistics or --plan, or say "
            "quantize.rounding=nearest"
        )


def lay_out(stage: Quantize, prepared: Prepared) -> Prepared:
    """Return the job with its output: the model as it is stored, with packed tensors in place of the weights."""
    model = prepared.model
    check_model(model)
    plain = Output(stored_container(model.checkpoint), layout_of(model), cost_of(model))
    return replace(prepared, planned=pack_output(stage, model, plain))


def describe_weights(stage: Quantize, prepared: Prepared, records: Sequence[Any]) -> QuantizedWeights:
    """Return how weights are stored, in the order of the files, with what rounding has changed of each."""
    packed = prepared.output.packed
    rounded = {weight.weight: weight for weight in records}
    usual, schemes = schemes_of(stage, packed)
    stored = {name: None if scheme == usual else scheme.name for name, scheme in schemes.items()}
    return QuantizedWeights(
        format=usual.format,
        group_size=usual.group_size,
        rounding=stage.rounding,
        weights=[rounded[name].model_copy(update={"stored": stored[name]}) for name in packed],
    )


def _make_record(prepared: Prepared, records: Mapping[str, Sequence[Any]], run: Run) -> QuantizationRecord:
    checkpoint, live, statistics = prepared.model.checkpoint, prepared.live, prepared.statistics
    stage = prepared.stage(QuantizeAlone)
    report, used = find_report(checkpoint.path), versions()
    # Of the files: the config of a class that nobody describes also holds what was found of it.
    fingerprint = Checkpoint.open(checkpoint.path).fingerprint
    weights = describe_weights(stage, prepared, records[stage.key])
    return QuantizationRecord(
        ckpt_prune=used["ckpt_prune"],
        torch=used["torch"],
        transformers=used["transformers"],
        compressed_tensors=str(require_library().__version__),
        source=Source(name=checkpoint.name, fingerprint=fingerprint, card=source_card(checkpoint.path)),
        auto_class=prepared.model.family.loading_class,
        format=weights.format,
        group_size=weights.group_size,
        rounding=weights.rounding,
        weights=weights.weights,
        statistics=None if statistics is None else statistics.index.digest,
        samples=None if live is None else len(live.samples),
        sample_digest=None if live is None else live.samples.fingerprint,
        before=checkpoint.nbytes,
        after=prepared.output.cost.bytes,
        report=None if report is None else report.data(),
    )


QUANTIZED = Form(find_record, _make_record, QUANTISATION_KIND, make_card)
