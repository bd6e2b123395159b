"""Whole models in memory, for evaluation only. Pruning never comes here: it reads one block at a time."""

from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ckpt_prune.architectures.composite import known_composites, load_composite
from ckpt_prune.architectures.descriptions import described, is_known
from ckpt_prune.architectures.family import REMOTE_PREFIX
from ckpt_prune.architectures.parts import GROUPED
from ckpt_prune.architectures.purposes import Purpose, purpose_of_class
from ckpt_prune.architectures.skeleton import (
    absent_pooler,
    base_of,
    is_stored_buffer,
    parse_config,
    quiet_transformers,
    shapes_alone,
)
from ckpt_prune.checkpoint.checkpoint import Checkpoint, check_config, check_index
from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.checkpoint.quantised import is_packed, is_plain_fp8, refuse_quantised
from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.common.errors import UserError
from ckpt_prune.containers.remote import remote_class, remote_model_class, with_block_facts
from ckpt_prune.evaluation.device_map import DeviceMap, device_map


@dataclass(frozen=True)
class LoadReport:
    """What stock transformers found wanting when it loaded a folder; each sorted, all empty when all is well."""

    missing: tuple[str, ...]
    """Parameters of the model that the folder does not have: transformers fills them with random numbers."""
    unexpected: tuple[str, ...]
    """Tensors of the folder that the model has no place for and does not compute itself: transformers drops them."""
    mismatched: tuple[str, ...]
    """Parameters whose shape differs, as "name: folder's shape, model's shape"."""

    @property
    def clean(self) -> bool:
        """Whether every tensor of the folder went into the model and every parameter came from the folder."""
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def fault(self) -> str:
        """How many of each were found wanting, and the first of them; empty when all is well."""
        parts = {"missing": self.missing, "unexpected": self.unexpected, "mismatched": self.mismatched}
        return "; ".join(f"{len(names)} {what}, first {names[0]}" for what, names in parts.items() if names)


def load_model(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str | None = None,
    auto: str | None = None,
    trust_remote_code: bool = False,
    whole: bool = False,
) -> PreTrainedModel:
    """Load a WHOLE model into memory for evaluation, in evaluation mode.

    Tensors that the model has no place for are left out, as stock transformers does: the figure measured is the one
    its users would get; `ckpt_prune.evaluation.parity.stock_load_report` names them.

    Args:
        folder: A checkpoint folder.
        device: Where the model goes, unless it is to be spread over several (`placing.spread`).
        dtype: Of its parameters; "auto" is the checkpoint's own. None is float32 on CPU, where bf16 is slow, and the
            checkpoint's own elsewhere.
        auto: The class of a stock model, as `load_reported` takes it. Without it an embedder is its base model.
        trust_remote_code: Run code that the folder brings, where it is not this tool's.
        whole: On one device in any case.

    Raises:
        UserError: The folder wants remote code that is not ours, does not load, or lacks tensors of its model.
    """
    if dtype is None:
        dtype = default_dtype(device)
    places = None if whole else device_map()
    model, report = load_reported(folder, dtype=dtype, auto=auto, trust_remote_code=trust_remote_code, places=places)
    wanting = (*report.missing, *report.mismatched)
    if wanting:
        more = f" and {len(wanting) - 1} more" if len(wanting) > 1 else ""
        raise UserError(
            f"{folder}: tensors are missing or of the wrong shape: {wanting[0]}{more}; "
            f"run `ckpt-prune verify {folder}` for all of them"
        )
    if auto is None and find_sentence_use(folder) == "sentence-similarity":
        model = base_of(model)
    return model if places is not None else model.to(device)


def default_dtype(device: torch.device | str) -> torch.dtype | str:
    """Float32 on CPU, where bf16 is slow, and the checkpoint's own elsewhere."""
    return torch.float32 if torch.device(device).type == "cpu" else "auto"


def load_reported(
    folder: Path,
    *,
    dtype: torch.dtype | str = "auto",
    auto: str | None = None,
    trust_remote_code: bool = False,
    places: DeviceMap | None = None,
) -> tuple[PreTrainedModel, LoadReport]:
    """Load a folder as `from_pretrained` does for anyone, on CPU, and say what did not fit.

    An output of this tool with remote code is built by the same implementation inside this package; its file is not
    run. A base model whose pooler the folder lacks is one without a pooler.

    Args:
        folder: A checkpoint folder, single-file or sharded. Pickles are not read.
        dtype: Of the parameters; "auto" is the checkpoint's own.
        auto: The Auto class of a stock model, or the class itself; by default the Auto class of the architecture in
            config.json, or AutoModel for an embedder.
        trust_remote_code: Run the folder's own code, where it is not this tool's.
        places: Where its parts may go, if not all on CPU.

    Raises:
        UserError: The folder wants remote code that is not ours and not trusted, or transformers cannot load it at all.
    """
    raw = read_config(folder)
    try:
        ours = remote_class(raw, folder)
        foreign = False
    except UserError as error:
        if not trust_remote_code:
            raise UserError(f"{error}; where you have read and trust it, say --trust-remote-code") from error
        ours, foreign = None, True
    if not is_packed(raw):
        refuse_quantised(folder, raw)
    check_index(folder)
    loader: Any = getattr(transformers, auto or loading_class(folder, raw))
    options: dict[str, Any] = {"trust_remote_code": foreign}
    source: Path | None = folder
    # compressed-tensors shows bars of its own, which nothing turns off.
    with quiet_transformers(), redirect_stderr(StringIO()) if is_packed(raw) else nullcontext():
        try:
            if ours is not None:
                loader = remote_model_class(ours)
                loader.register_for_auto_class(auto_class(raw))  # so that what is saved of it carries the code
                stored = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
                options = {"config": with_block_facts(stored, ours)}
            elif places is not None and (is_packed(raw) or (is_plain_fp8(raw) and not foreign)):
                raise UserError(f"{folder}: quantised weights are converted in memory, and do not go with --device-map")
            elif is_plain_fp8(raw) and not foreign:
                # transformers' own way needs a GPU, or another package.
                checkpoint, source = Checkpoint.open(folder), None
                options = {
                    "config": parse_config(checkpoint.config),
                    "state_dict": checkpoint.read(checkpoint.tensors),
                }
                if hasattr(loader, "from_config"):  # an Auto class cannot load what is in memory
                    with shapes_alone():
                        loader = type(loader.from_config(options["config"]))
            load = loader.from_pretrained if places is None else partial(places.loaded, loader)
            model, info = load(
                source,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name, where transformers would stop with a table
                output_loading_info=True,
                dtype=dtype,
                **options,
            )
            if is_packed(raw):  # which the first forward pass does else
                model.hf_quantizer.compressor.decompress_model(model)
        except UserError:
            raise
        except Exception as error:  # transformers raises anything here, from OSError to safetensors' own type
            reason = " ".join(str(error).split()) or type(error).__name__
            by = "transformers" if foreign or ours else "stock transformers"
            raise UserError(f"{folder}: {by} cannot load it: {reason[:300]}") from error
    pooler = absent_pooler(model, info["missing_keys"])
    if pooler:  # transformers has filled it with random numbers
        model.pooler = None
    mismatched = (f"{name}: {tuple(stored)}, {tuple(wanted)}" for name, stored, wanted in info["mismatched_keys"])
    report = LoadReport(
        missing=tuple(sorted(set(info["missing_keys"]) - pooler)),
        unexpected=tuple(sorted(name for name in info["unexpected_keys"] if not is_stored_buffer(name))),
        mismatched=tuple(sorted(mismatched)),
    )
    _settle_experts(model)
    return model.eval(), report


def _settle_experts(model: nn.Module) -> None:
    """Let experts run one by one where torch's grouped products do not take their width (`parts.GROUPED`)."""
    module: Any
    for module in model.modules():
        down = getattr(module, "down_proj", None)
        if hasattr(module, "is_concatenated") and isinstance(down, Tensor) and down.shape[-1] % GROUPED:
            module.config._experts_implementation = "eager"


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        UserError: It is not there, or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = parse_json_object(read_input(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a checkpoint folder") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    return check_config(path, config)


def config_of(folder: Path, *, trust: bool = False) -> PreTrainedConfig:
    """The transformers config object of a folder, of a graph's as well.

    Args:
        folder: with a config.json.
        trust: run the folder's own code, where it is not this tool's.

    Returns:
        That of its model_type; a plain one where transformers does not know the type and the folder has no code for it,
        as in an exported folder, whose graph needs none.

    Raises:
        UserError: config.json cannot be read or is refused, or asks for code that is not trusted.
    """
    raw = read_config(folder)
    try:
        remote_class(raw, folder)
    except UserError as error:
        if not trust:
            raise UserError(f"{error}; where you have read and trust it, say --trust-remote-code") from error
        try:
            with quiet_transformers():
                own: PreTrainedConfig = AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=True
                )
        except Exception as failure:  # the folder's own code raises anything
            reason = " ".join(str(failure).split()) or type(failure).__name__
            raise UserError(f"{folder}: its config cannot be loaded: {reason[:300]}") from failure
        return own
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{folder}: config.json has no model_type, so nothing can load it")
    if model_type not in CONFIG_MAPPING:
        return PreTrainedConfig.from_dict(raw)
    return parse_config(raw)


def auto_class(config: dict[str, Any]) -> str:
    """The Auto class of a config.json: of its family's class where the family is known, else by the class's name."""
    name = str(next(iter(config.get("architectures") or []), "")).removeprefix(REMOTE_PREFIX)
    if config.get("model_type") in known_composites():
        composite = load_composite(config["model_type"])
        return composite.auto if name in ("", composite.architecture) else _by_name(name)
    if not is_known(config):
        return _by_name(name)
    family = described(config)
    if name and not family.has_class(name):
        return _by_name(name)
    return family.of(name or family.architecture).auto_class


def loading_class(folder: Path, config: dict[str, Any]) -> str:
    """The Auto class that a folder with a config.json is loaded by: that of the base model for an embedder."""
    return "AutoModel" if find_sentence_use(folder) == "sentence-similarity" else auto_class(config)


def purpose_of_folder(folder: Path) -> Purpose | None:
    """What the model or graph in a folder is for, as `purpose_of` says.

    Raises:
        UserError: config.json or modules.json cannot be read.
    """
    return purpose_of(read_config(folder), folder)


def purpose_of(config: dict[str, Any], folder: Path | None = None) -> Purpose | None:
    """What a model is for; None if its class is for something that this package does nothing with.

    Args:
        config: its config.json.
        folder: of the checkpoint or graph; without it config.json alone says what it is for.

    Raises:
        UserError: modules.json cannot be read.
    """
    name = str(next(iter(config.get("architectures") or []), "")).removeprefix(REMOTE_PREFIX)
    known = is_known(config) and name in described(config).architectures
    binary = known and described(config).of(name).binary
    used_for = None if folder is None else find_sentence_use(folder)
    return purpose_of_class(auto_class(config), binary=binary, used_for=used_for)


def reads_causally(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a family of causal language models, whatever the class at hand is for."""
    return is_known(config) and described(config).has_causal


def _by_name(architecture: str) -> str:
    if architecture in MODEL_MAPPING_NAMES.values():
        return "AutoModel"
    task = architecture.rpartition("For")[2]
    auto = f"AutoModelFor{task}"
    return auto if "For" in architecture and hasattr(transformers, auto) else "AutoModelForCausalLM"
