"""Runs that end in the middle."""

import pytest


def interrupt_at(
    patch: pytest.MonkeyPatch, owner: type, method: str, call: int, error: BaseException | None = None
) -> None:
    """Ctrl-C, or an error, just before this call of a method."""
    original, calls = getattr(owner, method), 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error or KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, method, counted)
