"""Models without weights: stock transformers classes built on the meta device, the measure of every name and shape."""

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.utils import logging

from ckpt_prune.common.errors import UserError, find_interruption
from ckpt_prune.model.config_classes import import_validators

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Shape = tuple[int, ...]

# transformers warns at every config whose blocks differ; its classes then check the dense model's number. It also warns
# of settings of a config that was published so, such as rotary factors or tokens beyond the vocabulary.
for _module in ("integrations.heterogeneity.configuration_utils", "configuration_utils", "modeling_rope_utils"):
    logging.get_logger(f"transformers.{_module}").setLevel(logging.ERROR)


def parse_config(config: dict[str, Any]) -> "PreTrainedConfig":
    """Return the transformers config object of a config.json; RefusedConfigError if transformers refuses it."""
    return copy.deepcopy(_parse_config(json.dumps(config)))


@lru_cache(maxsize=64)
def _parse_config(config: str) -> "PreTrainedConfig":
    """Parse a config once: a command asks for the same one many times, and to copy it takes a fifteenth of the time."""
    import_validators()
    values = json.loads(config, object_hook=_decode_float)
    values.pop("auto_map", None)
    model_type = values.pop("model_type")
    try:
        parsed: Any = transformers.AutoConfig.for_model(model_type, **values)
        if getattr(parsed, "is_heterogeneous", False):
            parsed.allow_global_per_layer_attribute_access = True  # a number that blocks override is that of the others
        return parsed
    except Exception as error:  # the strict config classes raise several types of their own
        raise _refusal(error) from error


def _decode_float(values: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, because JSON has no infinity."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


class RefusedConfigError(UserError):
    """Transformers refuses a config, or cannot build its model.

    Attributes:
        rule: transformers' reason without the name of the check.
    """

    def __init__(self, reason: str) -> None:
        self.rule = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", reason)
        super().__init__(f"transformers refuses this config.json: {self.rule.rstrip('.')}; take it as it was published")


def _refusal(error: Exception) -> RefusedConfigError:
    """Return the error to report; raises an interruption that caused it."""
    stop = find_interruption(error)
    if stop is not None:
        raise stop
    return RefusedConfigError(" ".join(str(error).split()) or type(error).__name__)


def stock_class(architecture: str, config: "PreTrainedConfig") -> Any:
    """Return a class of transformers, also one that only the module of its model exports."""
    if hasattr(transformers, architecture):
        return getattr(transformers, architecture)
    module = type(config).__module__.replace("configuration_", "modeling_")
    return getattr(import_module(module), architecture)


def build_skeleton(config: "PreTrainedConfig", architecture: str) -> nn.Module:
    """Build a stock model on the meta device: every module and shape, no memory.

    RefusedConfigError if transformers cannot build it from this config.
    """
    return build_on_meta(lambda: stock_class(architecture, config)(config))


def build_on_meta(build: Callable[[], Any]) -> nn.Module:
    """Build a model of transformers, or one that derives from it, on the meta device, with its ties, in evaluation."""
    try:
        with on_meta_device(), warnings.catch_warnings(action="ignore"):
            model: Any = build()
    except Exception as error:  # whatever a wrong value runs into first
        raise _refusal(error) from error
    model.tie_weights()  # transformers does so only when it initialises them
    model.eval()
    return model  # type: ignore[no-any-return]


def base_model_of(model: Any) -> Any:
    """Return the base model inside a model of transformers, or the model itself if it has no head."""
    base = transformers.MODEL_MAPPING.get(type(model.config), None)
    # A base model may call a module of its own by the name that classes with a head give the base model.
    return model if base is not None and isinstance(model, base) else model.base_model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' loading bars and all messages but errors; restores the earlier settings."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if verbosity != logging.ERROR:  # setting it empties the caches of all loggers there are, which takes a millisecond
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if logging.get_verbosity() != verbosity:
            logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build modules on the meta device, without drawing random numbers, which would take most of the time."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        yield


@contextmanager
def skip_initialisation() -> Iterator[None]:
    """Build models with unwritten parameters and real buffers."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), warnings.catch_warnings(action="ignore"):
        yield


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules with real buffers, and parameters that move to the meta device when they are registered."""

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


EXPERT = re.compile(r"(?<=experts)\.\d+\.")
"""The number of an expert in the name of its tensor."""
AHEAD_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys that count blocks behind the last one, which predict further tokens (MTP)."""


class Names:
    """A model's parameters under their on-disk names, by transformers' own conversions in both directions.

    transformers 5 renames the modules of several families, and saves and loads them under the published names.

    Attributes:
        model: on the meta device.
        shapes: on-disk name → shape of every tensor that the model saves; a tied head appears under both names.
        ties: parameter → the parameter whose tensor it shares, by their names in the model.
        tied: on-disk names that share another tensor and so may be absent.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, revert_weight_conversion

        self.model = model
        self._parameters_by_name: dict[str, tuple[str, ...]] = {}
        self._parameters = model.state_dict()
        conversions = get_model_conversion_mapping(model)
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
        self._prefix: str = model.base_model_prefix  # type: ignore[assignment]
        try:
            saved = revert_weight_conversion(model, dict(self._parameters)) if conversions else self._parameters
        except RuntimeError as error:  # it takes no such number of heads (Kimi K2.5's rotary pairs)
            raise _refusal(error) from error
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        self.ties = find_ties(model)
        self.tied = frozenset(self.saved_as(name) for name in self.ties)

    def parameters(self, disk: str) -> tuple[str, ...]:
        """Return the parameters that a tensor on disk holds; none if the model has no place for it.

        A fused tensor holds several, parts of its rows in this order.
        """
        known = self._parameters_by_name
        if disk not in known:
            of_all = EXPERT.sub(".*.", disk)  # a parameter may hold all experts, of which there are thousands
            if of_all in known:
                known[disk] = known[of_all]
            else:
                known[disk], holds_all = self._convert(disk)
                if holds_all:
                    known[of_all] = known[disk]
        return known[disk]

    def rows(self, disk: str) -> list[int] | None:
        """Return the rows of the parameters that a fused tensor on disk holds; None if they are equal parts."""
        rows = [len(self._parameters[name]) for name in self.parameters(disk)]
        return rows if len(set(rows)) > 1 else None

    def split(self, disk: str, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Split a tensor on disk into so many parameters that it holds: parts of its rows, or all of it for one."""
        if count < 2:  # perhaps a number alone, which has no rows
            return self.turn(disk, (tensor,) * count)
        rows = self.rows(disk)
        return self.turn(disk, tensor.chunk(count) if rows is None else torch.split(tensor, rows))

    @cached_property
    def turns(self) -> dict[str, Any]:
        """Pattern of tensors on disk whose rotary pairs the model has in another order → their converter."""
        from transformers.core_model_loading import PermuteForRope

        converters = (e for e in self._converters if any(isinstance(op, PermuteForRope) for op in e.operations))
        return {pattern: each for each in converters for pattern in each.source_patterns}

    def turn(self, disk: str, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the parameters that a tensor on disk holds with rotary pairs as the model has them."""
        converter = self.turns.get(self._rename(disk)[1] or "") if self.turns else None
        if converter is None:
            return parts
        turned = dict(zip(converter.target_patterns, parts, strict=True))
        for operation in converter.operations[len(parts) > 1 :]:  # the first of several splits the tensor
            for name, part in turned.items():
                (turned[name],) = operation.convert({name: part}, [name], [name], config=self.model.config).values()
        return tuple(turned.values())

    def rename(self, disk: str) -> str:
        """Return the name that a tensor on disk would have in the model if it were not fused with others."""
        return self._rename(disk)[0]

    def _rename(self, disk: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        renamed = rename_source_key(disk, self._renamings, self._converters, self._prefix, self._parameters)
        return renamed[0], renamed[1]

    def _convert(self, disk: str) -> tuple[tuple[str, ...], bool]:
        """Return the parameters that a tensor on disk holds, and whether they hold all experts."""
        name, pattern = self._rename(disk)
        if pattern is None:  # a name that no renaming is right for is the model's own
            return tuple(each for each in (name, disk) if each in self._parameters)[:1], False
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        suffix = converter.target_patterns[0]
        # Patterns may end before the kind of tensor (`.weight`).
        before, _, after = name.rpartition(suffix)
        parameters = tuple(f"{before}{target}{after}" for target in converter.target_patterns)
        is_known = self._parameters.keys() >= set(parameters)
        return parameters if is_known else (), "*" in pattern and is_known

    def ignores(self, disk: str) -> bool:
        """Return whether the model's class has no place for a tensor on disk, and it or the config says so.

        Published checkpoints of DeepSeek V3 have a block behind the last one that predicts a second token. Its class
        names that block by the number it has there, and the config counts such blocks for models of any depth.
        """
        if self.parameters(disk):
            return False
        patterns: Iterable[str] = self.model._keys_to_ignore_on_load_unexpected or ()  # type: ignore[assignment]
        name, _ = self._rename(disk)
        block = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        return (block is not None and int(block[1]) in self._blocks_ahead) or any(re.search(e, name) for e in patterns)

    @cached_property
    def _blocks_ahead(self) -> range:
        config: Any = self.model.config
        config = config.get_text_config()
        last = getattr(config, "num_hidden_layers", 0)
        return range(last, last + max(getattr(config, key, None) or 0 for key in AHEAD_KEYS))

    def saved_as(self, parameter: str) -> str:
        if parameter in self.shapes:
            return parameter
        return next(disk for disk in self.shapes if parameter in self.parameters(disk))

    def parts(self, parameter: str) -> dict[str, int]:
        """Return the tensors on disk whose rows, one behind the other, make up a parameter → how many rows each has.

        Empty if one tensor holds it all, or stacks of experts make it up.
        """
        first = self.saved_as(parameter)
        if not self.is_part(first) or len(self.shapes[first]) < self._parameters[parameter].dim():
            return {}
        return {disk: shape[0] for disk, shape in self.shapes.items() if self.parameters(disk) == (parameter,)}

    def fit_together(self, disk: str, shapes: Mapping[str, Shape]) -> bool:
        """Return whether a tensor makes up a parameter with others, however many of its rows each of them has.

        Published files of Molmo 2 have rows for added tokens apart, and transformers saves two halves.
        """
        rows = self.parts(self.parameters(disk)[0]) if self.is_part(disk) else {}
        have = [shapes.get(name, (0,)) for name in rows]
        is_whole = bool(rows) and sum(rows.values()) == sum(shape[0] for shape in have)
        return is_whole and all(shape[1:] == self.shapes[disk][1:] for shape in have)

    def shape(self, disk: str) -> Shape | None:
        """Return the shape that a tensor on disk must have; None if the model has no place for it."""
        parameters = self.parameters(disk)
        if not parameters:
            return None
        if self.is_part(disk):
            return self.shapes.get(disk)
        first, *rest = (tuple(self._parameters[name].shape) for name in parameters)
        return (first[0] + sum(each[0] for each in rest), *first[1:]) if rest else first

    def is_turned(self, disk: str, shape: Shape) -> bool:
        """Return whether a tensor on disk has matrices the other way round, and transformers turns such as it loads.

        Qwen3-VL-MoE is published so, and saved as it is in memory.
        """
        from transformers.core_model_loading import Transpose

        pattern, wanted = self._rename(disk)[1], self.shape(disk)
        if pattern is None or wanted in (None, shape) or (*shape[:-2], *shape[:-3:-1]) != wanted:
            return False
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        return any(isinstance(each, Transpose) and each.check_dims for each in converter.operations)

    def missing(self, disk: Iterable[str]) -> list[str]:
        """Return on-disk names of the parameters that none of these tensors holds, sorted.

        A parameter that another is tied to is held by that one: transformers then ties them the other way round.
        """
        names = set(disk)
        stored = {parameter for name in names for parameter in self.parameters(name)}
        stored |= {source for parameter, source in self.ties.items() if parameter in stored}
        stored |= {parameter for parameter in self._parameters if self.is_computed(parameter)}
        lacking = {self.saved_as(parameter) for parameter in self._parameters if parameter not in stored}
        in_memory = {parameter for parameter in self._parameters if parameter in names}
        stacked = (name for name in self.shapes if name not in names and self.is_part(name))
        return sorted(lacking | {name for name in stacked if not in_memory.issuperset(self.parameters(name))})

    def is_computed(self, parameter: str) -> bool:
        """Return whether the class makes a parameter by itself if no tensor holds it, such as fixed positions."""
        patterns: Iterable[str] = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()
        return any(re.search(pattern, parameter) for pattern in patterns)

    def is_part(self, disk: str) -> bool:
        """Return whether a parameter is made of several tensors on disk, of which this is one.

        It stacks the weights of all experts, or has one tensor's rows behind another's.
        """
        parameters, shape = self.parameters(disk), self.shapes.get(disk)
        if shape is None or not parameters:
            return False
        held = tuple(self._parameters[parameters[0]].shape)  # of one of two stacks, if experts are of two kinds
        return len(shape) < len(held) if len(parameters) > 1 else shape != held


def stock_names(config: dict[str, Any], architecture: str) -> Names:
    """Return what a stock model saves and loads, cached: do not change it. UserError if the model cannot be built."""
    return _stock_names(json.dumps(config), architecture)


def convert_as_whole(whole: str, part: str) -> None:
    """Let transformers convert weights of a part by itself as those of the whole, if it has no way of its own.

    Only the whole has such a part, as its `model_type` tells (GLM-4.5V and MiniMax M3, with experts stored one by one).
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import WeightConverter

    if not part.startswith(f"{whole}_") or get_checkpoint_conversion_mapping(part) is not None:
        return
    known = get_checkpoint_conversion_mapping(whole) or []
    if converters := [each for each in known if isinstance(each, WeightConverter)]:
        register_checkpoint_conversion_mapping(part, converters)


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
    """Return whether a tensor is a buffer that old transformers saved and that models compute themselves."""
    return name.endswith(_STORED_BUFFERS)


PAIRS = "rotary_pairs"
"""Tensor of an attention that lacks rotary pairs: those that every KV head keeps, one head after the other."""

_COUNTED = "num_batches_tracked"
"""Tensor of a batch norm that says how long it was trained."""


def is_parameter(name: str) -> bool:
    """Return whether a tensor of a checkpoint counts among its parameters: all but buffers."""
    return not is_stored_buffer(name) and name.rpartition(".")[2] not in (PAIRS, _COUNTED)


def stored_key(key: str, values: Mapping[str, Any], config: "PreTrainedConfig") -> str:
    """Return the name that a config.json has for a key of its class, if the class knows the key by several names."""
    names = getattr(config, "attribute_map", {})
    alike = [name for name in {*names, *names.values()} if names.get(name, name) == names.get(key, key)]
    return next((name for name in alike if name in values and key not in values), key)


def find_ties(model: nn.Module) -> dict[str, str]:
    """Return parameter → the parameter whose tensor it shares, if config and class tie them."""
    return dict(getattr(model, "all_tied_weights_keys", {}))


def missing_pooler(model: nn.Module, missing: Iterable[str]) -> frozenset[str]:
    """Return the pooler's parameters if a checkpoint may lack them, all or none.

    Most embedding models are saved from a class built with `add_pooling_layer=False`, which their config.json does
    not say. Such a checkpoint computes what its model computes with None in place of the pooler.

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
