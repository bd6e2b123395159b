"""Runs that end in the middle."""

from typing import Any

import pytest

from ckpt_prune.checkpoint.writer import CheckpointWriter


def interrupt_at(
    patch: pytest.MonkeyPatch, owner: type, method: str, call: int, error: BaseException | None = None
) -> None:
    """Ctrl-C, or an error, just before this call of a method."""
    original, calls = getattr(owner, method), 0

    def count_call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error or KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, method, count_call)


def stop_before(patch: pytest.MonkeyPatch, stopped: str) -> None:
    """Let a run end just before it notes that this is done."""
    commit = CheckpointWriter.commit

    def stopping(self: CheckpointWriter, unit: str, *args: Any, **more: Any) -> None:
        if unit == stopped:
            raise KeyboardInterrupt
        commit(self, unit, *args, **more)

    patch.setattr(CheckpointWriter, "commit", stopping)
