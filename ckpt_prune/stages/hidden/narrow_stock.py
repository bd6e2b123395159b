"""Stock containers of a narrower residual stream: which class has one, and what it derives from its width."""

import copy
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.shard import TensorInfo
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.layout import Layout, plan_layout
from ckpt_prune.model.containers.choosing import NothingFitsError, choose_container
from ckpt_prune.model.containers.container import Container
from ckpt_prune.model.depth import module_facts
from ckpt_prune.model.matching import match_family
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import build_skeleton, parse_config, stored_key
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint


@dataclass(frozen=True, eq=False)
class NarrowCheckpoint(Checkpoint):
    """A view of the dense checkpoint in one basis of fewer dimensions, absorbed whenever a tensor is read.

    The tensors of the block that was read last are held.
    """

    view: SlicedCheckpoint = field(kw_only=True)
    _last: dict[int, dict[str, Tensor]] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(cls, view: SlicedCheckpoint, config: dict[str, Any], biases: Set[str]) -> "NarrowCheckpoint":
        """Make the checkpoint that a view would be stored as.

        The view has one basis for all blocks; `biases` are the linear modules of a block that have a bias in it.
        """
        source, model = view.source, view.model
        source_fields = {attribute.name: getattr(source, attribute.name) for attribute in fields(Checkpoint)}
        added = dict(view.added)
        for block in range(model.blocks):
            for module in sorted(biases):
                weight, bias = model.tensor(block, module), model.tensor(block, module, "bias")
                if weight in source.tensors and bias not in source.tensors:
                    rows = (added[weight][1] if weight in added else source.tensors[weight].shape)[0]
                    added[bias] = (weight, (rows,))
        tensors = source.tensors | {
            name: _reshape(source.tensors[beside], name, shape) for name, (beside, shape) in added.items()
        }
        return cls(**source_fields | {"config": config, "tensors": tensors, "replaced": {}}, view=view)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the named tensors with the basis absorbed."""
        names, model = list(names), self.view.model
        in_blocks: dict[str, Tensor] = {}
        for block in range(model.blocks):
            prefix = model.family.block.format(block=block)
            own_names = [name for name in names if name.startswith(prefix)]
            if own_names:
                block_tensors = self._block(block)
                in_blocks |= {name: block_tensors[name].clone() for name in own_names}
        return {name: in_blocks[name] if name in in_blocks else self.view.read([name])[name] for name in names}

    @cached_property
    def fingerprint(self) -> str:
        return self.view.source.fingerprint

    def _block(self, block: int) -> dict[str, Tensor]:
        if block not in self._last:
            block_tensors = self.view.block(block)
            prefix = self.view.family.block.format(block=block)
            empty = {n: info for n, info in self.tensors.items() if n.startswith(prefix) and n not in block_tensors}
            # Slots that the class opens beside those that something is absorbed into.
            block_tensors |= {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in empty.items()}
            self._last.clear()
            self._last[block] = block_tensors
        return self._last[block]


def _reshape(info: TensorInfo, name: str, shape: tuple[int, ...]) -> TensorInfo:
    turned = info.transposed and len(shape) > 1
    return replace(info, name=name, shape=shape, nbytes=prod(shape) * info.dtype.itemsize, transposed=turned)


OWN_CODE = "say --set hidden.kind=per-block, which needs remote code"


def narrow_container(view: SlicedCheckpoint) -> tuple[Container, Layout]:
    """Return the stock container of a model whose residual stream has lost dimensions, and its files.

    Args:
        view: the dense model in one basis of fewer dimensions.
    """
    model = view.model
    narrow = _narrow(model, view.kept)
    try:
        container = choose_container(narrow, narrow.dense_widths, view.biases)
    except NothingFitsError as error:
        raise UserError(f"no stock class fits: {'; '.join(dict.fromkeys(error.reasons))}: {OWN_CODE}") from error
    _check_heads(model, container)
    container = replace(container, config=view.config_values(container.config))
    if model.tied and not view.keeps_tie:
        untied = "the head is no longer tied to the embedding: it reads another basis"
        container = replace(container, note="; ".join(filter(None, [container.note, untied])))
    return container, plan_layout(model, narrow.dense_widths, container, view.added)


def narrow_model(view: SlicedCheckpoint) -> tuple[Model, str | None]:
    """Return the model in one basis of fewer dimensions, as its stock class has it: whatever prunes a model prunes it.

    Args:
        view: with or without its basis, which is asked for where a tensor is read.

    Returns:
        The model, and why it is of another class than the dense one; None where it is not.
    """
    container, _ = narrow_container(view)
    checkpoint = NarrowCheckpoint.of(view, container.config, container.biases)
    config = parse_config(container.config)
    return Model(checkpoint, match_family(checkpoint).with_config(config), config), container.note


def _narrow(model: Model, kept: int) -> Model:
    """Return the model under a config of a narrower stream that says whatever else follows from the dense width."""
    family, config, values = model.family, copy.copy(model.config), copy.deepcopy(model.checkpoint.config)
    changes: dict[str, Any] = {family.dimensions["hidden"][0]: kept}
    for name in ("head_dim", "mlp"):
        if family.dimensions.get(name):
            changes[family.dimensions[name][0]] = model.dimension(name)
    for key, value in changes.items():
        if not isinstance(getattr(type(config), key, None), property):
            setattr(config, key, value)
        values[stored_key(key, values, model.config)] = value
    return replace(model, checkpoint=replace(model.checkpoint, config=values), config=config)


def _check_heads(model: Model, container: Container) -> None:
    """Refuse a class that makes heads as wide as its stream is."""
    family, names = model.family, container.names()
    for module in family.attention.modules:
        name = model.tensor(0, module)
        have, dim = names.shape(name), 1 if module == family.attention.output else 0
        if name in model.checkpoint.transposed:
            dim = 1 - dim
        dense = model.checkpoint.tensors[name].stored_shape[dim]
        if have is None or have[dim] != dense:
            raise UserError(
                f"the heads of {container.model_type} are always as wide together as the hidden size, so that no stock "
                f"class has a narrower residual stream beside them: {OWN_CODE}"
            )


def embedding_scale(model: Model, container: Container) -> float:
    """Return the factor of the output's class on its embedding, as a share of the factor at the dense width."""
    key, width = model.family.dimensions["hidden"][0], model.dimension("hidden")
    wide = container.config | {stored_key(key, container.config, model.config): width}
    kept = int(getattr(parse_config(container.config), key))
    skeletons = [build_skeleton(parse_config(values), container.architecture) for values in (wide, container.config)]
    before, after = (module_facts(each) for each in skeletons)
    scale = 1.0
    for place in before:
        was, would = before[place], after.get(place)
        if was == would or _narrower(was, would, width, kept):
            continue
        scaled = isinstance(was, float) and isinstance(would, float) and place.endswith("embed_scale")
        if not scaled:
            raise UserError(
                f"the class of {container.model_type} derives {place} from the width of its stream ({was} at {width}, "
                f"{would} at {kept}): {OWN_CODE}"
            )
        scale = would / was
    return scale


def _narrower(was: Any, would: Any, width: int, kept: int) -> bool:
    """Return whether a fact is the width, or a shape with it, before and after."""
    if isinstance(was, tuple) and isinstance(would, tuple) and len(was) == len(would):
        return all(old == new or (old, new) == (width, kept) for old, new in zip(was, would, strict=True))
    return (was, would) == (width, kept)
