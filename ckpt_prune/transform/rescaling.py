"""Scales as the last step of a recipe: fitted to the blocks as they are written, and multiplied into them there."""

from collections.abc import Mapping
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.progress import track
from ckpt_prune.recovery.scales import Side, scaled
from ckpt_prune.recovery.training import Split
from ckpt_prune.report.model import Adapters
from ckpt_prune.report.stages import Stages
from ckpt_prune.transform.dense import Dense
from ckpt_prune.transform.fitting_scales import fitted_scales
from ckpt_prune.transform.resuming import Announce
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.walk import Sink

SCALES, SCALED = "scales", "scaled"
"""Units of the journal: scales are fitted; and, before its number, a block has them."""
_FILE = "scales.safetensors"
_OUTPUTS, _INPUTS = "outputs of ", "inputs of "


def rescaled(settled: Settled, sink: Sink, stages: Stages, announce: Announce) -> Adapters:
    """Fit scales to the blocks that a run has written, and multiply them in.

    The target is the model as it was given, with all its blocks and in its own basis. A run that is killed while they
    are fitted fits them again; one that is killed later goes on with them.

    Args:
        settled: the job, which trains by scales.
        sink: with every block written.
        stages: of the run.
        announce: as of `fitted_scales`.

    Returns:
        What was done.

    Raises:
        UserError: nothing can be fitted, or the disk refuses.
    """
    writer, model = sink.writer, settled.dense.model
    assert writer is not None
    prefixes = [model.family.block.format(block=block) for block in range(model.blocks)]
    if SCALES not in writer.notes:
        _fit(settled, sink, writer, stages, announce)
    told = Adapters.model_validate(writer.notes[SCALES])
    scales = _read(writer)
    todo = [block for block in range(model.blocks) if f"{SCALED} {block}" not in writer.done]
    with stages.stage("scaling"):
        for block in track(todo if scales else [], "scaling"):
            own = [name for name in scales if name.startswith(prefixes[block])]
            writer.rewrite(f"{SCALED} {block}", own, lambda tensors: scaled(tensors, scales))
    return told


def _fit(settled: Settled, sink: Sink, writer: CheckpointWriter, stages: Stages, announce: Announce) -> None:
    recipe, training, whole = settled.recipe.recovery, settled.request.training, settled.request.whole
    assert recipe is not None
    assert training is not None
    model, samples, dtype = settled.dense.model, training.samples, training.compute_dtype
    sizes = Split.of(len(samples), recipe.held_out).sizes(recipe)
    dense = Dense(whole.model, whole.device, container=whole.stored)

    def read(block: int) -> Mapping[str, Tensor]:
        return sink.read(model, block, model.family.block.format(block=block))[0]

    fitted, told = fitted_scales(
        Side(settled.dense.stream(samples, dtype, sizes=sizes, allocate=training.allocate), read, model.blocks),
        Side(dense.stream(samples, dtype, allocate=training.allocate), dense.block, whole.model.blocks),
        samples,
        recipe,
        seed=recipe.seed,
        text=model.family.modality == "text",
        seen=training.seen,
        stages=stages,
        announce=announce,
    )
    kept: dict[str, Any] = {}
    for name, (outputs, inputs) in fitted.scales.items():
        kept |= {_OUTPUTS + name: outputs.cpu(), _INPUTS + name: inputs.cpu()}
    writer.keep(_FILE, kept)
    writer.commit(SCALES, note=told.model_dump(mode="json"))


def _read(writer: CheckpointWriter) -> dict[str, tuple[Tensor, Tensor]]:
    kept = load_file(writer.scratch / _FILE)
    names = [name.removeprefix(_OUTPUTS) for name in kept if name.startswith(_OUTPUTS)]
    return {name: (kept[_OUTPUTS + name], kept[_INPUTS + name]) for name in names}
