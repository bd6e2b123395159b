"""Whole models: what the config.json of a folder says they are, and loading them. Pruning reads one block at a time."""

from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, MODEL_MAPPING_NAMES

from ckpt_prune.checkpoint.checkpoint import Checkpoint, check_config, check_index
from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.checkpoint.model_folder import refuse_adapter
from ckpt_prune.checkpoint.quantised import is_packed, is_read_as_plain, refuse_quantised
from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.evaluation.device_map import DeviceMap, current_device_map
from ckpt_prune.model.composites import is_composite, load_composite
from ckpt_prune.model.containers.remote import remote_class, remote_model_class, with_block_facts
from ckpt_prune.model.descriptions import family_for_config, has_description
from ckpt_prune.model.family import REMOTE_PREFIX
from ckpt_prune.model.family_keys import GROUPED
from ckpt_prune.model.purposes import Purpose, loading_class, purpose_of_class
from ckpt_prune.model.skeleton import (
    base_model_of,
    is_stored_buffer,
    missing_pooler,
    on_meta_device,
    parse_config,
    quiet_transformers,
)


@dataclass(frozen=True)
class LoadReport:
    """Names that did not fit when transformers loaded a folder; each sorted, all empty if everything did.

    Attributes:
        missing: parameters of the model that the folder does not have. transformers fills them with random numbers.
        unexpected: tensors that the model has no place for and does not compute itself. transformers drops them.
        mismatched: parameters whose shape differs, as "name: folder's shape, model's shape".
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def fault(self) -> str:
        parts = {"missing": self.missing, "unexpected": self.unexpected, "mismatched": self.mismatched}
        return "; ".join(f"{len(names)} {what}, first {names[0]}" for what, names in parts.items() if names)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_model(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str | None = None,
    auto: str | None = None,
    trust_remote_code: bool = False,
    whole: bool = False,
    unpack: bool = False,
) -> PreTrainedModel:
    """Load a WHOLE model into memory, in evaluation mode.

    Tensors that the model has no place for are left out, as stock transformers does: what is measured is what its users
    get. `stock_load_report` names them.

    Args:
        device: where the model goes, unless it is spread over several (`device_map.spread`).
        dtype: "auto" is the checkpoint's own; by default `default_dtype`.
        auto: class of a stock model, as in `load_reported`. Without it an embedder is its base model.
        trust_remote_code: run code that the folder brings and that is not this tool's.
        whole: load onto `device` in any case.
        unpack: give weights of few bits that `quantize` wrote plain modules, in place of those of compressed-tensors.
    """
    places = None if whole else current_device_map()
    model, report = load_reported(
        folder,
        dtype=default_dtype(device) if dtype is None else dtype,
        auto=auto,
        trust_remote_code=trust_remote_code,
        places=places,
        unpack=unpack,
    )
    faults = (*report.missing, *report.mismatched)
    if faults:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise UserError(
            f"{folder}: tensors are missing or of the wrong shape: {faults[0]}{more}; "
            f"run `ckpt-prune verify {folder}` for all of them"
        )
    if auto is None and find_sentence_use(folder) == "sentence-similarity":
        model = base_model_of(model)
    return model if places is not None else model.to(device)


def default_dtype(device: torch.device | str) -> torch.dtype | str:
    """Return float32 for CPU, where bfloat16 is slow, and the checkpoint's own type for other devices."""
    return torch.float32 if torch.device(device).type == "cpu" else "auto"


def stock_load_report(folder: Path, auto: str | None = None) -> LoadReport:
    """Load a folder in its own dtype with stock transformers, and say what did not fit."""
    return load_reported(folder, auto=auto, places=current_device_map())[1]


def load_reported(
    folder: Path,
    *,
    dtype: torch.dtype | str = "auto",
    auto: str | None = None,
    trust_remote_code: bool = False,
    places: DeviceMap | None = None,
    unpack: bool = False,
) -> tuple[PreTrainedModel, LoadReport]:
    """Load a folder as `from_pretrained` does for anyone, on CPU, and say what did not fit.

    An output of this tool with remote code is built by the same implementation inside this package; its file is not
    run. If the folder lacks the pooler of a base model, the model gets none. Pickles are not read.

    Args:
        dtype: of the parameters; "auto" is the checkpoint's own.
        auto: name of the class; by default `loading_class_of` the folder.
        trust_remote_code: run the folder's own code.
        places: where its parts may go, if not all on CPU.
        unpack: as in `load_model`.
    """
    raw = read_config(folder)
    try:
        ours, foreign = remote_class(raw, folder), False
    except UserError as error:
        if not trust_remote_code:
            raise _ask_for_trust(error) from error
        ours, foreign = None, True
    if not is_packed(raw):
        refuse_quantised(folder, raw)
    check_index(folder)
    if places is not None and (is_packed(raw) or (is_read_as_plain(raw) and not foreign)):
        raise UserError(f"{folder}: quantised weights are converted in memory, and do not go with --device-map")
    # compressed-tensors shows bars of its own, which nothing turns off.
    with quiet_transformers(), redirect_stderr(StringIO()) if is_packed(raw) else nullcontext():
        try:
            loader: Any = getattr(transformers, auto or loading_class_of(folder, raw))
            options: dict[str, Any] = {"trust_remote_code": foreign}
            source: Path | None = folder
            if ours is not None:
                loader = remote_model_class(ours)
                loader.register_for_auto_class(auto_class(raw))  # so that what is saved of it carries the code
                stored = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
                options = {"config": with_block_facts(stored, ours)}
            elif (is_read_as_plain(raw) and not foreign) or (unpack and is_packed(raw)):
                loader, options = _convert_weights(loader, folder)
                source = None
            load = loader.from_pretrained if places is None else partial(places.load, loader)
            model, info = load(
                source,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name; transformers would stop with a table
                output_loading_info=True,
                dtype=dtype,
                **options,
            )
            if is_packed(raw) and source is not None:  # else the first forward pass does it
                model.hf_quantizer.compressor.decompress_model(model)
        except UserError:
            raise
        except Exception as error:  # transformers raises anything here, from OSError to safetensors' own type
            by = "transformers" if foreign or ours else "stock transformers"
            raise UserError(f"{folder}: {by} cannot load it: {one_line(error)}") from error
    pooler = missing_pooler(model, info["missing_keys"])
    if pooler:  # transformers has filled it with random numbers
        model.pooler = None
    mismatched = (f"{name}: {tuple(stored)}, {tuple(asked)}" for name, stored, asked in info["mismatched_keys"])
    report = LoadReport(
        missing=tuple(sorted(set(info["missing_keys"]) - pooler)),
        unexpected=tuple(sorted(name for name in info["unexpected_keys"] if not is_stored_buffer(name))),
        mismatched=tuple(sorted(mismatched)),
    )
    _run_experts(model)
    return model.eval(), report


def _convert_weights(loader: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the class and the plain tensors of weights in float8, MXFP4 or few bits.

    transformers' own way needs a GPU, or another package, and leaves modules that are not traced.
    """
    checkpoint = Checkpoint.open(folder, packed=True)
    config = parse_config(checkpoint.config)
    if hasattr(loader, "from_config"):  # an Auto class cannot load what is in memory
        with on_meta_device():
            loader = type(loader.from_config(config))
    return loader, {"config": config, "state_dict": checkpoint.read(checkpoint.tensors)}


def _ask_for_trust(error: UserError) -> UserError:
    return UserError(f"{error}; where you have read and trust it, say --trust-remote-code")


def _run_experts(model: Any) -> None:
    """Let experts run one by one if torch's grouped products do not take their width (`GROUPED`), else by these.

    transformers looks for experts in the source of a class's module, and code of an output's own has none there.
    """
    if type(model).__name__.startswith(REMOTE_PREFIX):
        stock: Any = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
        type(model)._can_set_experts_implementation = stock._can_set_experts_implementation
        for each in (model, model.base_model):  # blocks read the latter's
            each.config._experts_implementation = model.get_correct_experts_implementation(None)
    module: Any
    for module in model.modules():
        down = getattr(module, "down_proj", None)
        if hasattr(module, "is_concatenated") and isinstance(down, Tensor) and down.shape[-1] % GROUPED:
            module.config._experts_implementation = "eager"


# ---- config.json -----------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    refuse_adapter(folder)
    path = folder / "config.json"
    try:
        config = parse_json_object(read_input(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a checkpoint folder") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    return check_config(path, config)


def config_of(folder: Path, *, trust: bool = False) -> PreTrainedConfig:
    """Return the transformers config object of a folder; its own code is run with `trust`.

    It is a plain one if transformers does not know the model_type and the folder has no code for it, as in an exported
    folder.
    """
    raw = read_config(folder)
    try:
        remote_class(raw, folder)
    except UserError as error:
        if not trust:
            raise _ask_for_trust(error) from error
        try:
            with quiet_transformers():
                config: PreTrainedConfig = AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=True
                )
        except Exception as failure:  # the folder's own code raises anything
            raise UserError(f"{folder}: its config cannot be loaded: {one_line(failure)}") from failure
        return config
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{folder}: config.json has no model_type, so nothing can load it")
    return parse_config(raw) if model_type in CONFIG_MAPPING else PreTrainedConfig.from_dict(raw)


def auto_class(config: dict[str, Any]) -> str:
    """Return the Auto class of a config.json, by its family if that is known, else by the name of the class."""
    name = _architecture(config)
    if is_composite(config):
        composite = load_composite(config)
        return composite.auto if name in ("", composite.architecture) else _guess_auto_class(name)
    if not has_description(config):
        return _guess_auto_class(name)
    family = family_for_config(config)
    if name and not family.has_class(name):
        return _guess_auto_class(name)
    return family.of(name or family.architecture).auto_class


def loading_class_of(folder: Path, config: dict[str, Any]) -> str:
    """Return the Auto class that loads a folder."""
    return loading_class(auto_class(config), find_sentence_use(folder))


def purpose_of_folder(folder: Path) -> Purpose | None:
    """Return what the model or graph in a folder is for, as `purpose_of` does."""
    return purpose_of(read_config(folder), folder)


def purpose_of(config: dict[str, Any], folder: Path | None = None) -> Purpose | None:
    """Return what a model is for, by config.json and modules.json; None if this package has no use for it."""
    name = _architecture(config)
    binary = (
        has_description(config)
        and name in family_for_config(config).architectures
        and family_for_config(config).of(name).binary
    )
    used_for = None if folder is None else find_sentence_use(folder)
    return purpose_of_class(auto_class(config), binary=binary, used_for=used_for)


def reads_causally(config: dict[str, Any]) -> bool:
    """Return whether a config.json is of a family of causal language models, whatever its class is for."""
    return has_description(config) and family_for_config(config).has_causal


def _architecture(config: dict[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or []), "")).removeprefix(REMOTE_PREFIX)


def _guess_auto_class(architecture: str) -> str:
    if architecture in MODEL_MAPPING_NAMES.values():
        return "AutoModel"
    if architecture in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values():
        return "AutoModelForTextEncoding"
    auto = f"AutoModelFor{architecture.rpartition('For')[2]}"
    return auto if "For" in architecture and hasattr(transformers, auto) else "AutoModelForCausalLM"
