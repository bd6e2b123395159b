"""The work of the stage `Afterwards`: LaCo, scales or LoRA on a model that was pruned before."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor

from ckpt_prune.checkpoint.adapters import ADAPTER_WEIGHTS
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import ADAPTER_FOLDER, ADAPTER_PLACE, ROTATIONS
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.layout import Output, layout_of
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.stages.recovery.block_training import trainable_tensors
from ckpt_prune.stages.recovery.keys import Afterwards
from ckpt_prune.stages.recovery.lora import (
    LoraExamples,
    MergedAdapters,
    adapter_config,
    lora_rate,
    require_peft,
    train_adapters,
)
from ckpt_prune.stages.recovery.run import recover_step
from ckpt_prune.stages.recovery.snows import have_same_shapes
from ckpt_prune.stages.recovery.target import DenseTarget
from ckpt_prune.stages.recovery.train_once import train_once
from ckpt_prune.stages.recovery.training import Progress, Trained
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.shared.pairs import (
    at_same_depth,
    check_models,
    check_one_stream,
    refuse_factored,
    rotated_as,
)

_WEIGHT = ".weight"
_ADAPTERS = "adapters"
"""Entry of the journal: adapters are trained."""
_FILE = "adapters.safetensors"
_FACTORS = "factors.safetensors"
"""The same adapters before they are merged, in peft's names."""
_FEW_ZEROS = 0.01
"""Share of zeros that weights may have without a mask."""


def check_afterwards(recovery: Afterwards, prepared: Prepared) -> None:
    """Refuse a model that cannot be recovered, or not towards this dense one."""
    pruned, dense = prepared.model, prepared.job.dense
    refuse_factored(pruned)
    if recovery.method == "lora":
        require_peft()
        check_one_stream(pruned, "adapters have no place beside its skip connections")
        return
    assert dense is not None
    same_depth, _ = at_same_depth(pruned, dense, find_report(pruned.checkpoint.path))
    check_models(pruned, same_depth, "a model is recovered against the dense one it was made from")
    if recovery.method == "snows" and not have_same_shapes(pruned, same_depth):
        raise UserError("snows fits the weights that a mask leaves, in the dense model's shapes: recover by laco")


def lay_out(recovery: Afterwards, prepared: Prepared) -> Prepared:
    """Return the job with an output of the model's own shape, and with the dense model in the model's basis."""
    pruned, dense, container, target = prepared.model, prepared.job.dense, container_of(prepared.model), None
    if dense is not None and recovery.method != "lora":
        report = find_report(pruned.checkpoint.path)
        same_depth, all_blocks = at_same_depth(pruned, dense, report)
        rotated = rotated_as(pruned, dense, prepared.device, report)
        # Masks leave shapes alone: in another basis, the dense model is built as the pruned one is.
        target = ModelView(same_depth, prepared.device, rotated, None if rotated is None else container, all_blocks)
    copied = (ROTATIONS,) if (pruned.checkpoint.path / ROTATIONS).is_file() else ()
    output = Output(container, layout_of(pruned), cost_of(pruned), copied=copied)
    prepared = replace(prepared, planned=output)
    return prepared if target is None else prepared.knowing(DenseTarget(target))


def reason_to_doubt(prepared: Prepared) -> str | None:
    """Return a warning if the dense model is probably a mistake: the same, or not what the model was made from."""
    pruned, dense = prepared.model.checkpoint, prepared.job.dense
    if dense is None:
        return None
    if pruned.fingerprint == dense.checkpoint.fingerprint:
        return f"{pruned.path} and {dense.checkpoint.path} are the same model: there is nothing to recover"
    report = find_report(pruned.path)
    if report is None or report.source.fingerprint == dense.checkpoint.fingerprint:
        return None
    return (
        f"{pruned.path} says it was made from another model ({report.source.name}) than {dense.checkpoint.path}: "
        "right where it was pruned more than once, else give the dense model it was made from"
    )


def train_before_blocks(recovery: Afterwards, prepared: Prepared, run: Run) -> None:
    """Train LoRA's adapters, unless an interrupted run has."""
    if recovery.method != "lora":
        return

    def files(merged: MergedAdapters) -> dict[str, dict[str, Tensor]]:
        return {_FILE: merged.weights} | ({_FACTORS: merged.factors} if recovery.lora.keep_adapter else {})

    fit = partial(_train_adapters, recovery, prepared, run)
    run.done["adapters"] = train_once(recovery, prepared, run, _ADAPTERS, fit, files)


def write_adapter(recovery: Afterwards, prepared: Prepared, run: Run) -> None:
    """Write the adapter beside the weights that it is merged into, if it is asked for and there is one."""
    factors, writer = run.scratch / _FACTORS, run.writer
    if writer is None or not factors.is_file():
        return
    pruned, text = prepared.model.checkpoint, prepared.model.family.purpose == "text-generation"
    modules = list(adapted_modules(recovery, prepared.model))
    config = adapter_config(modules, recovery.lora, text=text) | base_of(pruned.path)
    writer.copy(factors, f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}")
    writer.write_json(ADAPTER_PLACE, config)


def base_of(folder: Path) -> dict[str, str]:
    """Return what an adapter says of its model: its folder, or the commit on the Hub that the folder is of."""
    name = model_name(folder)
    if "/" in name:
        return {"base_model_name_or_path": name, "revision": folder.resolve().name}
    return {"base_model_name_or_path": str(folder.absolute())}


def afterwards_step(recovery: Afterwards, prepared: Prepared, run: Run) -> Step | None:
    """Return what trains a block, or puts trained weights into it; None for scales, which are fitted at the end."""
    if recovery.method == "lora":
        trained = run.done["adapters"].modules > 0
        return _MergeStep(load_file(run.scratch / _FILE) if trained else {}, prepared.model)
    step = recover_step(recovery, prepared)
    for line in (reason_to_doubt(prepared), None if step is None else step.recoverer.summary):
        if line is not None:
            run.announce(line)
    return step


class _MergeStep(Step):
    """Puts weights with merged adapters into each block."""

    record = BaseModel

    def __init__(self, weights: dict[str, Tensor], model: Model) -> None:
        self._weights, self._transposed = weights, model.checkpoint.transposed

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[BaseModel]]:
        changed = {name: self._weights[name] for name in tensors.keys() & self._weights.keys()}
        return {**tensors, **{n: t.T if n in self._transposed else t for n, t in changed.items()}}, []


def _train_adapters(recovery: Afterwards, prepared: Prepared, run: Run, progress: Progress) -> Trained[MergedAdapters]:
    pruned, training = prepared.model.checkpoint, prepared.job.training
    assert training is not None
    modules = adapted_modules(recovery, prepared.model)
    samples, dtype = training.samples, training.compute_dtype
    run.announce(_memory_line(recovery, prepared.model, modules, dtype))
    with run.timer.time("loading"):
        model = load_model(pruned.whole, device=prepared.device, dtype=dtype)
    with run.timer.time("training"):
        trained = train_adapters(
            model,
            modules,
            LoraExamples(samples.batch(slice(None)), training.classes),
            recovery,
            recovery.lora,
            rate=lora_rate(recovery, prepared.model.dimension("hidden")),
            seed=recovery.seed,
            progress=progress,
        )
    # Otherwise new weights would be written beside what another process has put there since.
    pruned.check_unchanged()
    if recovery.lora.keep_adapter and trained.kept is not None:
        weights = trained.kept.weights.values()
        if sum(int((weight == 0).sum()) for weight in weights) > _FEW_ZEROS * sum(map(torch.numel, weights)):
            run.announce("zeros of a mask stay in the merged weights; the adapter by itself would fill them")
    return trained


def adapted_modules(recovery: Afterwards, model: Model) -> dict[str, tuple[str, torch.dtype]]:
    """Map linear modules of the loaded model to the tensor on disk that is their weight, and its type."""
    stored = Checkpoint.open(model.checkpoint.path)
    tensors = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in stored.tensors.items()}
    names = container_of(model).names()
    modules = {}
    for block in recovery.blocks(model.blocks):
        for name in trainable_tensors(model.family, block, tensors, recovery.only):
            parameters = names.parameters(name) if name.endswith(_WEIGHT) and tensors[name].numel() else ()
            if len(parameters) == 1 and parameters[0].endswith(_WEIGHT):
                modules[parameters[0].removesuffix(_WEIGHT)] = (name, tensors[name].dtype)
    if not modules:
        raise UserError(f"{stored.path}: transformers holds its linear modules as others, which peft gives no adapters")
    return modules


def _memory_line(
    recovery: Afterwards, model: Model, modules: dict[str, tuple[str, torch.dtype]], dtype: torch.dtype
) -> str:
    tensors = model.checkpoint.tensors
    model_bytes = sum(info.numel for info in tensors.values()) * dtype.itemsize
    kept = sum(tensors[name].numel * stored.itemsize for name, stored in modules.values() if name in tensors)
    return (
        f"LoRA holds the whole model, {human_bytes(model_bytes + 2 * kept)} with its weights as they were and become, "
        f"and the activations of a batch of {recovery.batch} (--accumulate for parts of it); --method laco "
        "holds one block"
    )
