"""Train adapters on a whole model, judged as they will be stored: merged, rounded, zeros where they were."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.measure.samples.image_files import find_all_images
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.instructions import IGNORED
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.options.training import LoraSettings, RecoverySettings
from ckpt_prune.stages.recovery.training import Objective, Progress, SampleSplit, Trained, cut, part_size, train

_WARM_UP = 0.05
"""Share of the steps over which the learning rate climbs."""
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
            With `labels` (N, T) the tokens that are not `IGNORED` there are targets, and no others.
        classes: of images, (N,) int64; None for text, where every token is the target of those before it.
    """

    inputs: dict[str, Tensor]
    classes: Tensor | None = None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        """Return the mean cross entropy of these samples, or of all their answers' tokens, in nats."""
        batch = {name: values[rows].to(model.device) for name, values in self.inputs.items()}
        if self.classes is not None:
            return cross_entropy(model(**batch).logits.float(), self.classes[rows].to(model.device))
        targets = batch.pop("labels", batch["input_ids"])[:, 1:].flatten()
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED)

    def weight(self, rows: Tensor) -> int:
        """Return what the mean over these samples counts for: how many there are, or tokens of their answers."""
        labels = self.inputs.get("labels")
        return len(rows) if labels is None else int((labels[rows, 1:] != IGNORED).sum())


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
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    files = find_all_images(images.images, labels=images.labels, split="calib", id2label=names)
    if files.labels is None:
        raise UserError("--method lora needs the images' classes: give --labels FILE or a sub-folder per class")
    class_of = dict(zip(files.paths, files.labels, strict=True))
    return torch.tensor([class_of[path] for path in samples.paths])


def require_peft() -> Any:
    """Import peft, or say how to install it."""
    try:
        import peft
    except ImportError as error:
        raise UserError(f"peft is not installed: {install('lora')}") from error
    return peft


def lora_rate(settings: RecoverySettings, hidden: int) -> float:
    """Return the learning rate: the one asked for, else the usual one, more on smaller models."""
    return settings.lr if settings.lr is not None else min(_MOST_RATE, _RATE * _HIDDEN / hidden)


class MergedAdapters(NamedTuple):
    """Merged weights by on-disk name, and if they are asked for the adapters' own matrices in peft's names."""

    weights: dict[str, Tensor]
    factors: dict[str, Tensor]


def train_adapters(
    model: Any,
    modules: Mapping[str, tuple[str, torch.dtype]],
    examples: LoraExamples,
    settings: RecoverySettings,
    lora: LoraSettings,
    *,
    rate: float,
    seed: int,
    progress: Progress,
) -> Trained[MergedAdapters]:
    """Train adapters beside linear modules by AdamW, and merge those of the epoch that was best on held-out samples.

    Losses are in nats.

    Args:
        model: in float32 or bfloat16, on its device. It is changed.
        modules: module that gets an adapter → its weight's on-disk name and dtype.
        examples: a share of them is held out.
        settings: of training; those of single blocks do not count.
        seed: of the adapters and the order of samples.
    """
    split = SampleSplit.of(len(examples), settings.held_out)
    with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(seed)
        objective = LoraObjective(model, modules, examples, lora, part_size(settings))
        optimizer = torch.optim.AdamW(objective.parameters, lr=rate, weight_decay=lora.weight_decay)
        return train(objective, optimizer, split, settings, seed=seed, seconds=lora.seconds, progress=progress)


class LoraObjective(Objective[MergedAdapters]):
    """Mean cross entropy of samples, in nats. It is measured with adapters merged, rounded, and zeros kept.

    Args: as in `train_adapters`.
        part: samples that go through the model at once.
    """

    def __init__(
        self,
        model: Any,
        modules: Mapping[str, tuple[str, torch.dtype]],
        examples: LoraExamples,
        lora: LoraSettings,
        part: int,
    ) -> None:
        peft = require_peft()
        weights = {module: model.get_submodule(module).weight.detach() for module in modules}
        self._stored = {name: weights[module].to(dtype, copy=True) for module, (name, dtype) in modules.items()}
        self._examples, self._lora, self._part = examples, lora, part
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(modules)
        )
        self._model = peft.get_peft_model(model, config)
        adapted = self._model.base_model.model
        self._adapters = {name: adapted.get_submodule(module) for module, (name, _) in modules.items()}
        self.parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def climb(self, steps: int) -> float:
        return _WARM_UP * steps if self._lora.warm_up is None else float(self._lora.warm_up)

    def add_gradients(self, rows: Tensor) -> None:
        self._model.train()
        for part in cut(rows, self._part):
            share = self._examples.weight(part) / self._examples.weight(rows)
            loss: Any = self._examples.loss(self._model, part) * share
            loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, _MOST_NORM)

    @torch.no_grad()
    def loss(self, rows: Tensor) -> float:
        self._model.eval()
        merged = self._merge()
        for name, layer in self._adapters.items():
            layer.base_layer.weight.copy_(merged[name])
        with self._model.disable_adapter():
            total = sum(
                self._examples.loss(self._model, part).item() * self._examples.weight(part)
                for part in cut(rows, self._part)
            )
        for name, layer in self._adapters.items():
            layer.base_layer.weight.copy_(self._stored[name])
        return total / self._examples.weight(rows)

    @torch.no_grad()
    def keep(self) -> MergedAdapters:
        factors = {}
        if self._lora.keep_adapter:
            saved = require_peft().get_peft_model_state_dict(self._model, save_embedding_layers=False)
            factors = {name: matrix.detach().clone() for name, matrix in saved.items()}
        return MergedAdapters(self._merge(), factors)

    def _merge(self) -> dict[str, Tensor]:
        """Return the weights that would be stored now: adapters merged, rounded, zeros where they were."""
        merged = {}
        for name, layer in self._adapters.items():
            old = self._stored[name]
            weight = old.to(layer.base_layer.weight.dtype) + layer.get_delta_weight(_ADAPTER)
            merged[name] = torch.where(old == 0, 0, weight).to(old.dtype)
        return merged


def adapter_config(modules: Sequence[str], lora: LoraSettings, *, text: bool) -> dict[str, Any]:
    """Return adapter_config.json of adapters on these modules, but for the model that they belong to."""
    peft = require_peft()
    values: dict[str, Any] = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        task_type="CAUSAL_LM" if text else None,
        inference_mode=True,
    ).to_dict()
    # peft holds names as a set, which has no order.
    return values | {"target_modules": sorted(modules)}
