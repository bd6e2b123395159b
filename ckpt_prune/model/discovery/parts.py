"""Finds text part and tower of a model that is made of several, in its stock class, and stages of a model of images."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import count_stages, text_key
from ckpt_prune.model.skeleton import RefusedConfigError, build_skeleton, parse_config

_MAPPINGS = {
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForSemanticSegmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForTextEncoding": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
}
_BARE = ("AutoModel", "AutoModelForTextEncoding")
"""Classes without a head."""
_WITH_HEAD = [auto for auto in _MAPPINGS if auto not in _BARE]
_TEXT = ("AutoModelForCausalLM", "AutoModelForMaskedLM")
_IMAGES = ("AutoModelForImageClassification", "AutoModelForSemanticSegmentation", "AutoModel")
_STAGE = "it is calibrated on images, which all stages read"
_OWN_IMAGES = "it is calibrated on its own images"
_ONLY_TEXT = "it is calibrated on text alone: what its blocks see of images plays no part in what goes"


def find_composite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a composite that has none, as in a file: its text part, by the class of that alone.

    Of a model of images in stages, each stage is a part.

    UserError if transformers has no such class, or its model holds no module of the kind that it is made of.
    """
    model_type, declared = str(values.get("model_type")), values.get("architectures") or []
    if count := count_stages(values):
        whole_auto, architecture = find_class(model_type, _IMAGES, declared)
        if declared and architecture not in declared:
            raise UserError(
                f"config.json names {declared[0]}, which is not a known class of {model_type}; one is {architecture}"
            )
        stages = {
            f"stage{number}": {"auto": whole_auto, "modules": {}, "note": _STAGE} for number in range(1, count + 1)
        }
        parts = {name: stage | {"stack": name} for name, stage in stages.items()}
        return {"model_type": model_type, "architecture": architecture, "auto": whole_auto, "parts": parts}
    refuse_nested(values)
    words = text_key(values)
    if words is None and not values.get("vision_config"):
        raise UserError(f"--part is for models that are made of several, which a {model_type} is not")
    whole_auto, architecture = find_class(model_type, _WITH_HEAD)
    if declared and architecture not in declared:  # the whole with a head that puts images into classes (ShieldGemma 2)
        with suppress(UserError):
            named = find_class(model_type, _IMAGES[:1], declared)
            whole_auto, architecture = named if named[0] == _IMAGES[0] else (whole_auto, architecture)
    config = parse_config(values)
    models: dict[str, Any] = {}
    refused: dict[str, str] = {}
    try:
        whole = build_skeleton(config, architecture)
    except RefusedConfigError as error:
        raise UserError(f"{model_type} is made of several models, and cannot be built: {error.rule}") from error
    if words is None:
        refused["text"] = "config.json has no config of it alone"
    elif words == "decoder":
        refused["text"] = (
            "its blocks read what the tower makes of an image, and no pairs of an image and its text are read"
        )
    else:
        try:
            models["text"] = _find_text(whole, config)
        except UserError as error:
            refused["text"] = str(error)
    seen = "encoder" if words == "decoder" else "vision_config"
    if hasattr(config, seen):
        try:
            models["vision"] = _find_tower(whole, config, seen)
        except UserError as error:
            refused["vision"] = str(error)
    return {
        "model_type": model_type,
        "architecture": architecture,
        "auto": whole_auto,
        "parts": models,
        "refused": refused,
    }


def refuse_nested(values: Mapping[str, Any]) -> None:
    """Refuse a config with a part that is made of several itself, and has a type of its own (Qwen-Omni's thinker)."""
    model_type = values.get("model_type")
    for key, inner in values.items():
        kind = str(inner.get("model_type")) if isinstance(inner, dict) and "text_config" in inner else ""
        if kind.startswith(f"{model_type}_"):
            _, own = find_class(kind, _WITH_HEAD)
            raise UserError(
                f"the model of a {model_type} that reads text and images stands in its {key}: save that alone, by "
                f"transformers.{own}.from_pretrained(MODEL).save_pretrained(OUT), beside it the tokenizer and "
                "processor, and prune OUT"
            )


def _find_text(whole: nn.Module, config: Any) -> dict[str, Any]:
    """Return the description of the text part of a model, as a class or as a module of it; UserError if none."""
    text = config.text_config
    auto, modules = "AutoModel", dict[str, str]()
    for autos in ([*_TEXT, "AutoModel"], ["AutoModel"]):  # the whole may have a head of its own
        with suppress(UserError):
            auto, own = find_class(text.model_type, autos)
            modules = _find_modules(whole, build_skeleton(text, own))
        if modules:
            break
    note = f"{_ONLY_TEXT}; --data FILE calibrates it on both" if hasattr(config, "vision_config") else _ONLY_TEXT
    modules = modules or {_find_module(whole, text, "it holds no model of text with the config text_config"): ""}
    return {"config": "text_config", "auto": auto, "modules": modules, "note": note}


def _find_tower(whole: nn.Module, config: Any, key: str) -> dict[str, Any]:
    """Return the description of the tower of a config, the model in another that reads images; UserError if none."""
    inner = getattr(config, key)
    if not isinstance(inner, PreTrainedConfig):
        raise UserError(f"its config.json has no {key}")
    if count := count_stages(inner.to_dict()):
        raise UserError(f"it has blocks in {count} stages of their own widths, and stages inside a part are not pruned")
    path = _find_module(whole, inner, "no model with a class of its own reads images in it")
    if hasattr(whole.get_submodule(path), "timm_model"):
        raise UserError("it is a model of the package timm, and config.json states no width of it")
    return {"config": key, "auto": "AutoModel", "modules": {path: ""}, "note": _OWN_IMAGES}


def _find_module(whole: nn.Module, config: Any, otherwise: str) -> str:
    """Return the path of the first model inside another that has a config of this type; UserError if there is none."""
    models = ((path, each) for path, each in whole.named_modules() if path and isinstance(each, PreTrainedModel))
    found: dict[str, Any] = {path: type(each) for path, each in models if type(each.config) is type(config)}
    if not found:
        raise UserError(otherwise)
    first, *others = [path for path, kind in found.items() if kind is next(iter(found.values()))]
    if others:
        raise UserError(f"{first} and {others[0]} have one config, and would have to keep as many units")
    return first


def find_class(model_type: str, autos: Sequence[str], declared: Sequence[str] = ()) -> tuple[str, str]:
    """Return the first of these Auto classes that loads a type, and the stock class that it loads.

    The type of a part may be that of no Auto class, though the class of the whole's type is made of its config.

    Args:
        declared: classes that a config.json names: one of these before others, also if no Auto class loads it.
    """
    import transformers

    modeling = import_module("transformers.models.auto.modeling_auto")
    stocks = {auto: getattr(modeling, _MAPPINGS[auto]) for auto in autos}
    listed = ((auto, stock.get(model_type, ())) for auto, stock in stocks.items())
    classes = [(auto, name) for auto, names in listed for name in ([names] if isinstance(names, str) else names)]
    if not classes and model_type in transformers.CONFIG_MAPPING:
        config_class: Any = transformers.CONFIG_MAPPING[model_type]
        module = import_module(config_class.__module__.replace("configuration_", "modeling_"))
        names = {name for name, each in vars(module).items() if getattr(each, "config_class", None) is config_class}
        classes = [(auto, name) for auto, stock in stocks.items() for name in sorted(names & {*stock.values()})]
        classes = classes or [("AutoModel", name) for name in declared if name in names]
    if not classes:
        raise UserError(
            f"transformers {transformers.__version__} has no model of text or images for config.json of type "
            f"{model_type}"
        )
    return next((each for each in classes if each[1] in declared), classes[0])


def _find_modules(whole: Any, part: Any) -> dict[str, str]:
    """Return module of a model → module of a part of it: all of the part, or each of its own modules."""
    paths = {module: path for path, module in whole.named_modules() if path}

    def find(wanted: nn.Module) -> str | None:
        if wanted is part.get_output_embeddings():
            inside = (each.get_output_embeddings() for each in whole.modules() if isinstance(each, PreTrainedModel))
            return next((paths[head] for head in inside if head is not None), None)
        return next((path for module, path in paths.items() if type(module) is type(wanted)), None)

    alone = find(part)
    if alone is not None:
        return {alone: ""}
    place_of = {name: find(module) for name, module in part.named_children()}
    return {} if None in place_of.values() else {str(path): name for name, path in place_of.items()}
