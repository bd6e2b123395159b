"""Recover a pruned checkpoint by LoRA: trained whole, merged, written as any output."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.progress import meter
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.report import Adapters, Report
from ckpt_prune.job.report_file import report_of
from ckpt_prune.job.run import Announce
from ckpt_prune.job.timing import Stages
from ckpt_prune.job.training_settings import LoraSettings, RecoverySettings
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.matching import apply_family_ties
from ckpt_prune.model.model import Model
from ckpt_prune.runner.publish import publish, wanted_names
from ckpt_prune.stages.recovery.block_training import SampleSplit
from ckpt_prune.stages.recovery.lora import TrainedAdapters, lora_rate, require_peft, train_adapters
from ckpt_prune.stages.recovery.lora_examples import LoraExamples
from ckpt_prune.stages.recovery.reports import report_of_adapters
from ckpt_prune.stages.recovery.trainable import trainable_tensors

_WEIGHT = ".weight"


@dataclass(frozen=True)
class LoraRequest:
    """One pruned model and the samples for its adapters.

    Attributes:
        examples: the samples with their loss.
        seed: of the adapters and the order of samples.
        compute_dtype: in which the model is held and run.
    """

    pruned: Model
    settings: RecoverySettings
    lora: LoraSettings
    samples: Samples
    examples: LoraExamples
    seed: int
    compute_dtype: torch.dtype
    device: torch.device

    @property
    def digest(self) -> str:
        """sha256 of all that the output depends on."""
        parts = [
            *(__version__, "lora", self.pruned.checkpoint.fingerprint, self.samples.fingerprint, self.seed),
            *(self.settings.model_dump(mode="json"), self.lora.model_dump(mode="json"), str(self.compute_dtype)),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def modules_of(request: LoraRequest) -> dict[str, tuple[str, torch.dtype]]:
    """Map linear modules of the loaded model to the tensor on disk that is their weight, and its type.

    Refuses a model of which transformers holds none as a tensor of its own.
    """
    model, raw = request.pruned, Checkpoint.open(request.pruned.checkpoint.path)
    tensors = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in raw.tensors.items()}
    names = container_of(model).names()
    modules = {}
    for block in request.settings.blocks(model.blocks):
        for name in trainable_tensors(model.family, block, tensors, request.settings.only):
            parameters = names.parameters(name) if name.endswith(_WEIGHT) and tensors[name].numel() else ()
            if len(parameters) == 1:
                modules[parameters[0].removesuffix(_WEIGHT)] = (name, tensors[name].dtype)
    if not modules:
        raise UserError(f"{raw.path}: transformers holds its linear modules as others, which peft gives no adapters")
    return modules


def recover_by_lora(request: LoraRequest, out: Path, *, overwrite: bool, announce: Announce) -> Report:
    """Train adapters on the whole model and write it with them merged. Shapes, dtypes, names and zeros stay.

    Returns the report, as in the output's ckpt_prune.json. Nothing is left behind after an error.
    """
    require_peft()
    pruned = request.pruned.checkpoint
    report, modules = report_of(pruned.path), modules_of(request)
    # No run goes on with what another one has trained.
    kind = replace(OUTPUT_KIND, unfinished="asked")
    place = Staging(out, job=request.digest, overwrite=overwrite, kind=kind, wants=wanted_names(pruned))
    pruned.check_finite()
    announce(_memory(request, modules))
    stages = Stages(request.device)
    with stages.stage("loading"):
        model = load_model(pruned.path, device=request.device, dtype=request.compute_dtype)
    rate = lora_rate(request.settings, request.pruned.dimension("hidden"))
    with stages.stage("training"), meter(request.settings.epochs, "training adapters", unit="epoch") as epochs:
        adapted = train_adapters(
            model,
            {name: dtype for name, (_, dtype) in modules.items()},
            request.examples,
            request.settings,
            request.lora,
            rate=rate,
            seed=request.seed,
            progress=lambda epoch, loss: epochs.step(epoch, loss),
        )
    del model
    if not adapted.weights:
        announce("no epoch was better on the held-out samples: the weights stay as they are")
    changed = {modules[name][0]: weight.cpu() for name, weight in adapted.weights.items()}
    return _write(request, report, adapted, changed, place, stages, announce)


def _memory(request: LoraRequest, modules: dict[str, tuple[str, torch.dtype]]) -> str:
    tensors = request.pruned.checkpoint.tensors
    model_bytes = sum(info.numel for info in tensors.values()) * request.compute_dtype.itemsize
    kept = sum(tensors[name].numel * dtype.itemsize for name, dtype in modules.values() if name in tensors)
    return (
        f"LoRA holds the whole model, {human_bytes(model_bytes + 2 * kept)} with its weights as they were and become, "
        f"and the activations of a batch of {request.settings.batch} (--accumulate for parts of it); --method laco "
        "holds one block"
    )


def _write(
    request: LoraRequest,
    source_report: Report | None,
    adapted: TrainedAdapters,
    changed: dict[str, torch.Tensor],
    place: Staging,
    stages: Stages,
    announce: Announce,
) -> Report:
    """Write the source's tensors, and those that changed in their place."""
    source = apply_family_ties(Checkpoint.open(request.pruned.checkpoint.path), request.pruned.family)
    # Else what was trained would be written beside what another process has put there since.
    request.pruned.checkpoint.check_unchanged([*source.files, CONFIG])
    layout: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {name: {} for name in source.files}
    for name, info in source.tensors.items():
        layout[info.file][name] = (info.dtype, info.shape)
    record = Adapters(
        rank=request.lora.rank,
        alpha=request.lora.alpha,
        lr=adapted.rate,
        seed=request.seed,
        settings=request.settings.of_all(),
        data=request.samples.fingerprint,
        samples=len(request.samples),
        window=request.samples.tokens if request.examples.classes is None else None,
        measured=len(SampleSplit.of(len(request.samples), request.settings.held_out).measured),
        modules=len(changed),
        parameters=adapted.parameters,
        steps=adapted.steps,
        epochs=adapted.epochs,
        seconds=round(adapted.seconds, 3),
        loss_before=adapted.loss_before,
        loss_after=adapted.loss_after,
    )
    container = container_of(request.pruned)
    with place as staging:
        writer = CheckpointWriter(staging, layout, sharded=source.sharded)
        for name in source.tensors:
            writer.write(name, changed[name] if name in changed else source.read([name])[name])
        writer.commit("tensors")
        asides = [ROTATIONS] if (source.path / ROTATIONS).is_file() else []
        for name in asides:
            writer.copy(source.path / name)
        report = report_of_adapters(source_report, request.pruned, container, record)
        return publish(writer, report, container, request.pruned.checkpoint, [*layout, *asides], stages, announce)
