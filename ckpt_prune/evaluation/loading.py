"""Whole models in memory, for evaluation only. Pruning never comes here: it reads one block at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ckpt_prune.errors import UserError


@dataclass(frozen=True)
class LoadReport:
    """What stock transformers found wanting when it loaded a folder; each sorted, all empty when all is well."""

    missing: tuple[str, ...]
    """Parameters of the model that the folder does not have: transformers fills them with random numbers."""
    unexpected: tuple[str, ...]
    """Tensors of the folder that the model has no place for: transformers drops them."""
    mismatched: tuple[str, ...]
    """Parameters whose shape differs, as "name: folder's shape, model's shape"."""

    @property
    def clean(self) -> bool:
        """Whether every tensor of the folder went into the model and every parameter came from the folder."""
        return not (self.missing or self.unexpected or self.mismatched)


def load_model(folder: Path, *, device: torch.device | str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a WHOLE model into memory for evaluation, in evaluation mode.

    Tensors that the model has no place for are left out, as stock transformers does: the figure measured is the one
    its users would get; `ckpt_prune.evaluation.parity.stock_load_report` names them.

    Args:
        folder: A checkpoint folder.
        device: Where the model goes.
        dtype: Of its parameters. None is float32 on CPU, where bf16 is slow, and the checkpoint's own elsewhere.

    Raises:
        UserError: The folder wants remote code that is not ours, does not load, or lacks tensors of its model.
    """
    if dtype is None and torch.device(device).type == "cpu":
        dtype = torch.float32
    if _wants_remote_code(folder):
        if not (folder / "ckpt_prune.json").is_file():
            raise UserError(
                f"{folder}: config.json asks for remote code (auto_map), which is never run; "
                "use a checkpoint of a model type that transformers knows"
            )
        from ckpt_prune.loading import load  # here: everything else in this module does without our own loader

        with quiet_transformers():
            return load(folder, device=device, dtype=dtype).eval()
    model, report = stock_load(folder, dtype=dtype)
    wanting = (*report.missing, *report.mismatched)
    if wanting:
        more = f" and {len(wanting) - 1} more" if len(wanting) > 1 else ""
        raise UserError(
            f"{folder}: tensors are missing or of the wrong shape: {wanting[0]}{more}; "
            f"run `ckpt-prune verify {folder}` for all of them"
        )
    return model.to(device)


def stock_load(folder: Path, *, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, LoadReport]:
    """Load a folder as `AutoModelForCausalLM.from_pretrained` does for anyone, on CPU, and say what did not fit.

    Args:
        folder: A checkpoint folder, single-file or sharded. Its code, if any, is not run; pickles are not read.
        dtype: Of the parameters; None is the checkpoint's own.

    Raises:
        UserError: transformers cannot load the folder at all.
    """
    with quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name, where transformers would stop with a table
                output_loading_info=True,
                dtype=dtype or "auto",
            )
        except Exception as error:  # transformers raises anything here, from OSError to safetensors' own type
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{folder}: stock transformers cannot load it: {reason[:300]}") from error
    mismatched = (f"{name}: {tuple(stored)}, {tuple(wanted)}" for name, stored, wanted in info["mismatched_keys"])
    report = LoadReport(
        missing=tuple(sorted(info["missing_keys"])),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(sorted(mismatched)),
    )
    return model.eval(), report


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


def _wants_remote_code(folder: Path) -> bool:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a checkpoint folder") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    return isinstance(config, dict) and bool(config.get("auto_map"))
