"""Train a model with bare blocks to make the dense model's features (DC-ViT; stages/bare/README.md)."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.model import Model
from ckpt_prune.stages.bare.keys import Bare
from ckpt_prune.stages.bare.preview import bare_model, cut_block
from ckpt_prune.stages.recovery.training import Objective, Progress, SampleSplit, Trained, cut, part_size, train

Tensors = dict[str, Tensor]


class Mimicry:
    """A dense image classifier, its outputs on the images, and a student that is trained to give the same.

    In memory are both models, the gradients and moments of what is trained, and all images.

    Args:
        keys: how the image classifier is trained.
        seed: of the order of the images.

    Attributes:
        student: the model that is trained; at first the dense one.
    """

    def __init__(self, model: Model, keys: Bare, samples: Samples, device: torch.device, *, seed: int = 0) -> None:
        self.model, self.keys, self.device, self._seed = model, keys, device, seed
        self.split = SampleSplit.of(len(samples), keys.held_out)
        self._inputs = samples.batch(slice(None))
        self._part = part_size(keys.settings(1))
        self.dense: Any = load_model(model.checkpoint.whole, device=device, dtype=torch.float32).requires_grad_(False)
        self._factory = BlockFactory(model, device=device, dtype=torch.float32)
        self.features, self.logits = self._run_all(self.dense)
        self.reset()

    def reset(self) -> None:
        """Begin again with the dense model."""
        self.student = copy.deepcopy(self.dense)

    def replace_block(self, block: int, columns: Sequence[int]) -> None:
        """Take a block's attention, and all of its MLP but some columns. Trained weights stay as they are."""
        bare = bare_model(self.model, {block: columns})
        factory = BlockFactory(bare, device=self.device, dtype=torch.float32, skeleton=container_of(bare).skeleton())
        stay = set(bare.block_names(block))
        tensors = cut_block(self.model, self.block_tensors(block), block, columns)
        self._layers[block] = factory.build_block(block, {n: tensor for n, tensor in tensors.items() if n in stay})

    @property
    def _layers(self) -> Any:
        return self.student.get_submodule(self.model.family.layers)

    def block_tensors(self, block: int) -> Tensors:
        """Return the tensors of a block of the student by on-disk name, float32."""
        pieces = {name: self._parameters(block, name) for name in self.model.block_names(block)}
        return {name: torch.cat([p.detach() for p in parts]) for name, parts in pieces.items() if parts}

    def _parameters(self, block: int, name: str) -> list[nn.Parameter]:
        parameters = dict(self._layers[block].named_parameters())
        return [parameters[path] for path in self._factory.find_paths(block, name) if path in parameters]

    def train(self, blocks: int, epochs: int, progress: Progress = lambda _epoch, _loss: None) -> Trained[list[Tensor]]:
        """Train the first so many blocks, and leave them as they were in the best epoch, or at the start."""
        self.student.requires_grad_(False)
        parameters = [each.requires_grad_() for block in range(blocks) for each in self._layers[block].parameters()]
        objective = MimicObjective(self, parameters, self.keys.warm_up / epochs)
        start = objective.keep()
        optimizer = torch.optim.AdamW(parameters, lr=self.keys.lr, weight_decay=self.keys.weight_decay)
        trained = train(
            objective, optimizer, self.split, self.keys.settings(epochs), seed=self._seed, progress=progress
        )
        with torch.no_grad():
            for parameter, best in zip(parameters, trained.kept or start, strict=True):
                parameter.copy_(best)
        return trained

    @torch.no_grad()
    def divergence(self) -> float:
        """Return the mean KL divergence in nats from the dense model's classes, on images that are not trained on."""
        rows = self.split.measured
        logits = torch.cat([self.run(self.student, part)[1] for part in self.parts(rows)])
        dense = self.logits[rows].log_softmax(-1)
        return float(functional.kl_div(logits.log_softmax(-1), dense, log_target=True, reduction="batchmean"))

    @torch.no_grad()
    def _run_all(self, model: Any) -> tuple[Tensor, Tensor]:
        count = len(next(iter(self._inputs.values())))
        outputs = [self.run(model, part) for part in self.parts(torch.arange(count))]
        return torch.cat([each[0] for each in outputs]), torch.cat([each[1] for each in outputs])

    def run(self, model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head reads of some images, and the logits."""
        read: list[Tensor] = []
        assert self.model.family.head is not None
        head = model.get_submodule(self.model.family.head)
        hook = head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0]))
        logits: Tensor = model(**{name: each[rows].to(self.device) for name, each in self._inputs.items()}).logits
        hook.remove()
        return read[0], logits

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Cut the images of a batch into parts that go through the model at once."""
        return cut(rows, self._part)


class MimicObjective(Objective[list[Tensor]]):
    """Mean squared error of what the head reads.

    Args:
        parameters: float32, of the student.
        climb: share of the steps over which the learning rate climbs.
    """

    def __init__(self, mimicry: Mimicry, parameters: Sequence[nn.Parameter], climb: float) -> None:
        self._mimicry, self.parameters, self._climb = mimicry, parameters, climb

    def climb(self, steps: int) -> float:
        return min(1.0, self._climb) * steps

    def add_gradients(self, rows: Tensor) -> None:
        for part in self._mimicry.parts(rows):
            error: Any = self._error(part) * len(part) / len(rows)
            error.backward()

    @torch.no_grad()
    def loss(self, rows: Tensor) -> float:
        return sum(float(self._error(part)) * len(part) for part in self._mimicry.parts(rows)) / len(rows)

    def keep(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _error(self, rows: Tensor) -> Tensor:
        features, _ = self._mimicry.run(self._mimicry.student, rows)
        return functional.mse_loss(features, self._mimicry.features[rows])


def tensors_of(mimicry: Mimicry, blocks: int, dtypes: Mapping[str, torch.dtype]) -> Tensors:
    """Return the tensors of the student's first blocks, by on-disk name, rounded to their dtypes."""
    made: Tensors = {}
    for block in range(blocks):
        made |= mimicry.block_tensors(block)
    return {name: tensor.cpu().to(dtypes[name]).contiguous() for name, tensor in made.items()}
