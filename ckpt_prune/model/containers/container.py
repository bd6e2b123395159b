"""A container: the `model_type` and config that an output is stored under."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.model.containers.remote import RANKS_KEY, remote_class, remote_model_class, with_block_facts
from ckpt_prune.model.matching import match_family
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names, build_on_meta, build_skeleton, parse_config, stock_names
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.model.supported import declared_family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Widths = Sequence[Mapping[SpaceName, int]]
"""Units kept per block and space."""
Ranks = Sequence[Mapping[str, int]]
"""Per block, linear modules that two thin ones stand in for → their rank."""


@dataclass(frozen=True)
class Container:
    """The container that an output is stored in.

    Attributes:
        config: its config.json.
        remote_class: name of the class in `modeling_pruned`, if transformers has no stock class that fits.
        biases: linear modules of a block that have a bias tensor in the output. Those that gain none from a fold hold
            zeros, because the config key that opens another's slot opens theirs too.
        note: a line for the user if the container is not the source's own.
        architecture: the stock class that it loads with, or that its remote class stands for.
        padded: spaces held at their dense width, with zeros for dropped units.
        instead: what to say for a stock class, if there is code of its own only because none fits.
    """

    model_type: str
    config: dict[str, Any]
    remote_class: str | None = None
    biases: frozenset[str] = field(default_factory=frozenset)
    note: str | None = None
    architecture: str = ""
    padded: frozenset[SpaceName] = frozenset()
    instead: str = ""

    @property
    def unfactored(self) -> "Container":
        """The container with one linear in the place of two: for running with factors multiplied."""
        if RANKS_KEY not in self.config:
            return self
        config = {key: value for key, value in self.config.items() if key != RANKS_KEY}
        if "per_layer_config" in config:
            config["per_layer_config"] = {
                index: {key: value for key, value in values.items() if key != RANKS_KEY}
                for index, values in config["per_layer_config"].items()
            }
        return replace(self, config=config)

    def skeleton(self) -> nn.Module:
        """Build the container's model on the meta device."""
        config = parse_config(self.config)
        if self.remote_class is None:
            return build_skeleton(config, self._stock_class)
        return remote_skeleton(config, self.remote_class)

    def names(self) -> Names:
        """Return what its model saves and loads."""
        return stock_names(self.config, self._stock_class) if self.remote_class is None else Names(self.skeleton())

    @property
    def _stock_class(self) -> str:
        return self.architecture or declared_family(self.config).architecture


def stored_container(checkpoint: Checkpoint) -> Container:
    """Return what a checkpoint of a known family is stored as, an output of this tool or not."""
    remote = remote_class(checkpoint.config, checkpoint.path)
    architecture = "" if remote else match_family(checkpoint).architecture
    return Container(checkpoint.config["model_type"], checkpoint.config, remote, architecture=architecture)


def container_of(model: Model) -> Container:
    """Return what a model's checkpoint is stored as, with the linear modules that have a bias in it."""
    return replace(stored_container(model.checkpoint), biases=model.biased)


def remote_skeleton(config: "PreTrainedConfig", remote_class: str) -> nn.Module:
    """Build a model of `modeling_pruned` on the meta device.

    RefusedConfigError if the class cannot build it from this config.
    """
    return build_on_meta(lambda: remote_model_class(remote_class)(with_block_facts(config, remote_class)))
