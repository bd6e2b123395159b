"""Models without weights: stock transformers classes built on the meta device, the measure of every shape."""

import copy
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from ckpt_prune.errors import UserError


def parse_config(config: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config object of a config.json.

    Raises:
        UserError: transformers refuses it; its reason is passed on in one line.
    """
    values = copy.deepcopy(config)
    values.pop("auto_map", None)
    model_type = values.pop("model_type")
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # the strict config classes raise several types of their own
        raise _refused(error) from error


def _refused(error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"transformers refuses this config.json: {reason}")


def build_skeleton(config: PreTrainedConfig, architecture: str) -> nn.Module:
    """A stock model on the meta device: every module and shape, no memory.

    Raises:
        UserError: transformers cannot build it from this config.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model: nn.Module = getattr(transformers, architecture)(config)
    except Exception as error:  # whatever a wrong value runs into first
        raise _refused(error) from error
    return model.eval()


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor the model saves; a tied head appears under both names."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def is_stored_frequency(name: str) -> bool:
    """Whether a tensor holds rotary frequencies: old transformers saved them, models compute and ignore them."""
    return name.endswith("rotary_emb.inv_freq")


def tied_names(model: nn.Module) -> frozenset[str]:
    """Names that share another tensor and so may be absent on disk."""
    if not model.config.tie_word_embeddings:  # type: ignore[union-attr]
        return frozenset()
    return frozenset(model._tied_weights_keys or ())  # type: ignore[arg-type]


def parameter_count(model: nn.Module) -> int:
    """Parameters, a tied tensor counted once."""
    tied = tied_names(model)
    return sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in tied)
