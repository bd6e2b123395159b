"""Models without weights: stock transformers classes built on the meta device, the measure of every name and shape."""

import copy
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.utils import logging

from ckpt_prune.common.errors import UserError, find_interruption

Shape = tuple[int, ...]

# Where blocks differ, classes that check what all have in common read the dense model's number, and transformers warns
# of it at every config.
logging.get_logger("transformers.integrations.heterogeneity.configuration_utils").setLevel(logging.ERROR)


def parse_config(config: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config object of a config.json.

    Raises:
        RefusedConfigError: transformers refuses it; its reason is passed on in one line.
    """
    values = copy.deepcopy(config)
    values.pop("auto_map", None)
    model_type = values.pop("model_type")
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # the strict config classes raise several types of their own
        raise _refused(error) from error


class RefusedConfigError(UserError):
    """Transformers refuses a config, or cannot build its model.

    Args:
        reason: as transformers says it.

    Attributes:
        rule: the same without the name of the check.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"transformers refuses this config.json: {reason}")
        self.rule = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", reason)


def _refused(error: Exception) -> RefusedConfigError:
    """What is said of it; raises the interruption where that is what it comes from."""
    stop = find_interruption(error)
    if stop is not None:
        raise stop
    return RefusedConfigError(" ".join(str(error).split()) or type(error).__name__)


def stock_class(architecture: str, config: PreTrainedConfig) -> Any:
    """A class of transformers, also of those that it has no other name for than in the module of their model.

    Raises:
        AttributeError: it has no such class.
    """
    if hasattr(transformers, architecture):
        return getattr(transformers, architecture)
    module = type(config).__module__.replace("configuration_", "modeling_")
    return getattr(import_module(module), architecture)


def build_skeleton(config: PreTrainedConfig, architecture: str) -> nn.Module:
    """A stock model on the meta device: every module and shape, no memory.

    Raises:
        RefusedConfigError: transformers cannot build it from this config.
    """
    try:
        with on_meta_device(), warnings.catch_warnings(action="ignore"):
            made: Any = stock_class(architecture, config)(config)
    except Exception as error:  # whatever a wrong value runs into first
        raise _refused(error) from error
    made.tie_weights()  # which is done where weights are initialised
    model: nn.Module = made.eval()
    return model


def base_model_of(model: Any) -> Any:
    """The base model inside a model of transformers, or the model itself where it has no head."""
    base = MODEL_MAPPING.get(type(model.config), None)
    # A base model may call a module of its own by the name that classes with a head give the base model.
    return model if base is not None and isinstance(model, base) else model.base_model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' loading bars and all its notes but errors; restores what was set before."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Modules that are built in this context are on the meta device.

    No random numbers are drawn for them: without any memory to write them to, that is most of the time all the same.
    """
    with torch.device("meta"), no_init_weights():
        yield


@contextmanager
def skip_initialisation() -> Iterator[None]:
    """Models that are built in this context have parameters that nothing is written to, and real buffers."""
    with no_init_weights(), warnings.catch_warnings(action="ignore"):
        yield


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built in this context have real buffers, and parameters on the meta device.

    A parameter goes there as soon as it is registered, before anything is written to its memory.
    """

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


class Names:
    """A model's parameters under their on-disk names, by transformers' own conversions in both directions.

    transformers 5 renames the modules of several families, and saves and loads them under the published names.

    Args:
        model: on the meta device.

    Attributes:
        model: as given.
        shapes: on-disk name → shape of every tensor the model saves; a tied head appears under both names.
        ties: parameter → the one whose tensor it is, under their names in the model.
        tied: on-disk names that share another tensor and so may be absent.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._held: dict[str, tuple[str, ...]] = {}
        self._parameters = model.state_dict()
        conversions = get_model_conversion_mapping(model)
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
        self._prefix: str = model.base_model_prefix  # type: ignore[assignment]
        saved = revert_weight_conversion(model, dict(self._parameters)) if conversions else self._parameters
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        self.ties = find_ties(model)
        self.tied = frozenset(self.saved_as(name) for name in self.ties)

    def parameters(self, disk: str) -> tuple[str, ...]:
        """Names in the model of what a tensor on disk holds: none where the model has no place for it.

        A fused tensor holds several, equal parts of its rows in this order.
        """
        if disk not in self._held:
            self._held[disk] = self._renamed(disk)
        return self._held[disk]

    def _renamed(self, disk: str) -> tuple[str, ...]:
        name, pattern = rename_source_key(disk, self._renamings, self._converters, self._prefix, self._parameters)
        if pattern is None:
            return (name,) if name in self._parameters else ()
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        suffix = converter.target_patterns[0]
        held = tuple(name.removesuffix(suffix) + target for target in converter.target_patterns)
        return held if self._parameters.keys() >= set(held) else ()

    def ignores(self, disk: str) -> bool:
        """Whether the model's class has no place for a tensor on disk, and says that it does not load it.

        Published checkpoints of DeepSeek V3 have a block behind the last one that predicts a second token.
        """
        patterns: Iterable[str] = self.model._keys_to_ignore_on_load_unexpected or ()  # type: ignore[assignment]
        if not patterns or self.parameters(disk):
            return False
        name, _ = rename_source_key(disk, self._renamings, self._converters, self._prefix, self._parameters)
        return any(re.search(pattern, name) for pattern in patterns)

    def saved_as(self, parameter: str) -> str:
        """On-disk name of a parameter."""
        if parameter in self.shapes:
            return parameter
        return next(disk for disk in self.shapes if parameter in self.parameters(disk))

    def shape(self, disk: str) -> Shape | None:
        """Shape that a tensor on disk must have; None where the model has no place for it."""
        held = self.parameters(disk)
        if not held:
            return None
        if self._stacked(disk):  # a part of what the parameter holds
            return self.shapes.get(disk)
        first, *rest = (tuple(self._parameters[name].shape) for name in held)
        return (first[0] * (1 + len(rest)), *first[1:]) if rest else first

    def missing(self, disk: Iterable[str]) -> list[str]:
        """On-disk names of the parameters that none of these tensors holds, sorted.

        One that another is tied to is held by that: transformers ties them the other way round then.
        """
        given = set(disk)
        held = {parameter for name in given for parameter in self.parameters(name)}
        held |= {source for parameter, source in self.ties.items() if parameter in held}
        lacking = {self.saved_as(parameter) for parameter in self._parameters if parameter not in held}
        whole = {parameter for parameter in self._parameters if parameter in given}
        stacked = (name for name in self.shapes if name not in given and self._stacked(name))
        return sorted(lacking | {name for name in stacked if not whole.issuperset(self.parameters(name))})

    def _stacked(self, disk: str) -> bool:
        """Whether a tensor on disk is one of several that a parameter stacks: a weight of one expert."""
        held, shape = self.parameters(disk), self.shapes.get(disk)
        return shape is not None and len(held) == 1 and len(shape) < self._parameters[held[0]].dim()


def stock_names(config: dict[str, Any], architecture: str) -> Names:
    """What a stock model saves and loads.

    Opening a checkpoint and every check of it ask for that, so it is kept: nothing of it may be changed.

    Args:
        config: a config.json.
        architecture: class of transformers.

    Raises:
        UserError: transformers refuses the config, or cannot build the model.
    """
    return _stock_names(json.dumps(config), architecture)


@lru_cache(maxsize=16)
def _stock_names(config: str, architecture: str) -> Names:
    return Names(build_skeleton(parse_config(json.loads(config)), architecture))


_STORED_BUFFERS = (
    "rotary_emb.inv_freq",
    "embeddings.position_ids",
    "relative_position_bias.relative_position_index",
    *(f".{module}.{mask}" for module in ("attn", "attention") for mask in ("bias", "masked_bias")),
)


def is_stored_buffer(name: str) -> bool:
    """Whether a tensor holds what models compute themselves and ignore.

    Old transformers saved rotary frequencies, position indices, places in tables of positions and causal masks.
    """
    return name.endswith(_STORED_BUFFERS)


PAIRS = "rotary_pairs"
"""Tensor of an attention that lacks rotary pairs: those that every KV head keeps, one head after the other."""


def stored_key(key: str, values: Mapping[str, Any], config: PreTrainedConfig) -> str:
    """The name that a config.json has for a key of its class, where the class knows it by several."""
    names = getattr(config, "attribute_map", {})
    alike = [name for name in {*names, *names.values()} if names.get(name, name) == names.get(key, key)]
    return next((name for name in alike if name in values and key not in values), key)


def is_parameter(name: str) -> bool:
    """Whether a tensor of a checkpoint counts among its parameters: all but buffers."""
    return not is_stored_buffer(name) and name.rpartition(".")[2] != PAIRS


def find_ties(model: nn.Module) -> dict[str, str]:
    """Parameter → the one whose tensor it is, where config and class tie them."""
    return dict(getattr(model, "all_tied_weights_keys", {}))


def missing_pooler(model: nn.Module, missing: Iterable[str]) -> frozenset[str]:
    """Parameters of a base model's pooler that a checkpoint may lack: all or none.

    Most embedding models are saved from a class built with `add_pooling_layer=False`, which their config.json does
    not say. What such a checkpoint computes is what its model does with None in place of the pooler.

    Args:
        model: of the config, with its pooler.
        missing: its parameters that the checkpoint has no tensor for.
    """
    lacking = {name for name in missing if name.startswith("pooler.")}
    if not lacking:  # signatures take a millisecond to read, and most models lack nothing
        return frozenset()
    makers = [vars(each)["__init__"] for each in type(model).__mro__ if "__init__" in vars(each)]
    if not any("add_pooling_layer" in signature(make).parameters for make in makers):
        return frozenset()
    pooler = {name for name in model.state_dict() if name.startswith("pooler.")}
    return frozenset(pooler) if pooler <= lacking else frozenset()


def parameter_count(model: nn.Module) -> int:
    """Parameters, a tied tensor counted once."""
    tied = find_ties(model)
    return sum(t.numel() for name, t in model.state_dict().items() if name not in tied and is_parameter(name))
