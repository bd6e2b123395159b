"""Keeps the predictions of a reference on a text, for the next model that is compared with it.

Kept are the hidden states behind its last block: its head makes the logits of them anew, which would take a hundred
times the room.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.files import stamp_of
from ckpt_prune.checkpoint.staging import staged_file
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.user_cache import user_cache
from ckpt_prune.measure.samples.text import fingerprint_windows
from ckpt_prune.model.model import Model

MOST_BYTES = 2**31
"""Limit for all kept states together. The least recently used are deleted first."""
_NAME = "states"


class KeptStates:
    """A place for the states of one model on some windows.

    It is known by the model's bytes, and by the times of its files: an edit that a fingerprint does not see makes it
    another model.

    Args:
        model: on disk.
        windows: token ids, (windows, window) int64.
        device: that computes.
        dtype: in which it computes.
    """

    def __init__(self, model: Model, windows: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        checkpoint = model.checkpoint
        files = sorted({part.file for info in checkpoint.tensors.values() for part in info.parts})
        facts = [
            [__version__, torch.__version__, transformers.__version__, str(device), str(dtype)],
            [checkpoint.fingerprint, [stamp_of(checkpoint.path / file) for file in files]],
            fingerprint_windows(windows),
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self.path = user_cache("references") / f"{digest[:32]}.safetensors"

    def load_into(self, states: Tensor) -> bool:
        """Fill states, (windows, window, hidden), with those that are kept; False if there are none."""
        try:
            kept = load_file(self.path)[_NAME]
            if kept.shape != states.shape or kept.dtype != states.dtype:
                return False
            self.path.touch()  # it is used
        except Exception:  # absent, or damaged in whatever way
            return False
        states.copy_(kept)
        return True

    def keep(self, states: Tensor) -> None:
        """Keep states, if there is room: what is not kept is computed again."""
        if states.nbytes > MOST_BYTES // 2:
            return
        with suppress(OSError, UserError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with staged_file(self.path) as (file, _):
                save_file({_NAME: states.contiguous()}, file)
            _drop_oldest(self.path.parent)


def _drop_oldest(folder: Path) -> None:
    statuses = [(file, file.stat()) for file in folder.glob("*.safetensors")]
    total = sum(status.st_size for _, status in statuses)
    for file, status in sorted(statuses, key=lambda each: each[1].st_mtime_ns):
        if total <= MOST_BYTES:
            break
        file.unlink(missing_ok=True)
        total -= status.st_size
