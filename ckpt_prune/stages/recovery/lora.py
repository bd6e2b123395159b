"""Train adapters on a whole model, judged as they will be stored: merged, rounded, zeros where they were."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.image_files import find_images
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.options.training import LoraSettings, RecoverySettings
from ckpt_prune.stages.recovery.block_training import SampleSplit, cut, part_size
from ckpt_prune.stages.recovery.records import Trained

_WARM_UP = 0.05
"""Share of the training over which the learning rate climbs."""
_MOST_NORM = 1.0
"""Gradients are clipped to this norm, as transformers' Trainer does by default."""
_RATE, _HIDDEN, _MOST_RATE = 1e-4, 4096, 1e-3
"""The usual learning rate, the hidden size it is usual at, and the largest that is taken on small models."""
_ADAPTER = "default"


@dataclass(frozen=True)
class LoraExamples:
    """Samples with a loss.

    Attributes:
        inputs: what the model is called with, all samples at once: `input_ids` (N, T) or `pixel_values` (N, C, H, W).
        classes: of images, (N,) int64; None for text, where every token is the target of those before it.
    """

    inputs: dict[str, Tensor]
    classes: Tensor | None = None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        """Return the mean cross entropy of these samples, in nats."""
        batch = {name: values[rows].to(model.device) for name, values in self.inputs.items()}
        if self.classes is not None:
            return cross_entropy(model(**batch).logits.float(), self.classes[rows].to(model.device))
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def classes_of(model: Model, samples: Samples, images: SampleOptions) -> Tensor | None:
    """Return the classes of images, (N,) int64; None for text.

    Refuses a model that is neither a causal language model nor an image classifier, and images without classes.
    """
    purpose, folder = model.family.purpose, model.checkpoint.path
    if purpose not in ("text-generation", "image-classification"):
        raise UserError(
            f"--method lora trains on the next token or an image's class, which {folder} ({purpose}) does not predict: "
            "recover it with --method laco"
        )
    if not isinstance(samples, ImageSamples):
        return None
    assert images.images is not None
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    files = find_images(images.images, labels=images.labels, split="calib", id2label=names)
    if files.labels is None:
        raise UserError("--method lora needs the images' classes: give --labels FILE or a sub-folder per class")
    class_of = dict(zip(files.paths, files.labels, strict=True))
    return torch.tensor([class_of[path] for path in samples.paths])


def require_peft() -> Any:
    """Import peft, or say how to install it."""
    try:
        import peft
    except ImportError as error:
        raise UserError("peft is not installed; `pip install ckpt-prune[lora]`") from error
    return peft


def lora_rate(settings: RecoverySettings, hidden: int) -> float:
    """Return the learning rate: the one asked for, else the usual one, more on smaller models."""
    return settings.lr if settings.lr is not None else min(_MOST_RATE, _RATE * _HIDDEN / hidden)


def train_adapters(
    model: Any,
    dtypes: Mapping[str, torch.dtype],
    examples: LoraExamples,
    settings: RecoverySettings,
    lora: LoraSettings,
    *,
    rate: float,
    seed: int,
    progress: Callable[[int, float], None],
) -> Trained[Tensor]:
    """Train adapters beside linear modules, and merge those of the epoch that was best on held-out samples.

    Return the weights of modules as they are to be stored, and losses in nats.

    Args:
        model: in float32 or bfloat16, on its device. It is changed.
        dtypes: module that gets an adapter → dtype of its stored weight.
        examples: a share of them is held out.
        settings: of training; those of single blocks do not count.
        seed: of the adapters and the order of samples.
        progress: after every epoch its number and the held-out loss.
    """
    peft = require_peft()
    stored = {name: model.get_submodule(name).weight.detach().to(dtype, copy=True) for name, dtype in dtypes.items()}
    split = SampleSplit.of(len(examples), settings.held_out)
    size = part_size(settings)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(dtypes))
    with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, config)
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        adapters = {name: adapted.base_model.model.get_submodule(name) for name in dtypes}
        before = _loss(adapted, examples, split.measured, size)
        best, kept, factors, waited = before, dict[str, Tensor](), dict[str, Tensor](), 0
        start, steps, seen = time.monotonic(), 0, 0
        per_epoch = len(cut(split.train, settings.batch))
        optimizer = torch.optim.AdamW(trained, lr=rate)

        def over() -> float:
            """Share of the training that is done."""
            timed = 0.0 if lora.seconds is None else (time.monotonic() - start) / lora.seconds
            return max(timed, steps / (per_epoch * settings.epochs))

        for epoch, order in enumerate(_orders(len(split.train), seed), 1):
            adapted.train()
            for rows in cut(split.train[order], settings.batch):
                for part in cut(rows, size):
                    loss: Any = examples.loss(adapted, part) * (len(part) / len(rows))
                    loss.backward()
                nn.utils.clip_grad_norm_(trained, _MOST_NORM)
                for group in optimizer.param_groups:
                    group["lr"] = rate * _share(over(), settings.schedule)
                optimizer.step()
                optimizer.zero_grad()
                steps, seen = steps + 1, seen + len(rows)
                if over() >= 1:
                    break
            adapted.eval()
            with _as_stored(adapted, adapters, stored) as merged:
                loss_now = _loss(adapted, examples, split.measured, size)
                # Where nothing is held out, nothing is chosen: the last epoch's, unless it diverged.
                better = loss_now < best if settings.held_out else math.isfinite(loss_now)
                waited = 0 if better else waited + 1
                if better:
                    best, kept = loss_now, {name: weight.clone() for name, weight in merged.items()}
                    if lora.keep_adapter:
                        saved = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
                        factors = {name: matrix.detach().clone() for name, matrix in saved.items()}
            progress(epoch, loss_now)
            if over() >= 1 or waited >= settings.patience:
                break
    count = sum(parameter.numel() for parameter in trained)
    seconds = time.monotonic() - start
    return Trained(kept, before, best, steps, seen / len(split.train), seconds, count, rate, factors)


def adapter_config(modules: Sequence[str], lora: LoraSettings, *, text: bool) -> dict[str, Any]:
    """Return adapter_config.json of adapters on these modules, but for the model that they belong to."""
    peft = require_peft()
    values: dict[str, Any] = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        task_type="CAUSAL_LM" if text else None,
        inference_mode=True,
    ).to_dict()
    # peft holds names as a set, which has no order.
    return values | {"target_modules": sorted(modules)}


def _orders(count: int, seed: int) -> Iterator[Tensor]:
    """Yield orders of so many samples, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(count, generator=generator)


def _share(done: float, schedule: str) -> float:
    """Return the learning rate as a share of the highest: up in a line, then down in a cosine, or constant."""
    if done < _WARM_UP:
        return max(done, 1e-3) / _WARM_UP
    if schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * min(1.0, (done - _WARM_UP) / (1 - _WARM_UP)))) / 2


@torch.no_grad()
def _loss(model: Any, examples: LoraExamples, rows: Tensor, size: int) -> float:
    model.eval()
    return sum(examples.loss(model, part).item() * len(part) for part in cut(rows, size)) / len(rows)


@contextmanager
@torch.no_grad()
def _as_stored(model: Any, adapters: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Give the model the weights that would be stored now: adapters merged, rounded, zeros kept. Then restore it."""
    merged = {}
    for name, layer in adapters.items():
        old = stored[name]
        weight = old.to(layer.base_layer.weight.dtype) + layer.get_delta_weight(_ADAPTER)
        merged[name] = torch.where(old == 0, 0, weight).to(old.dtype)
        layer.base_layer.weight.copy_(merged[name])
    try:
        with model.disable_adapter():
            yield merged
    finally:
        for name, layer in adapters.items():
            layer.base_layer.weight.copy_(stored[name])
