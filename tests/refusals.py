"""Catch the refusal of a call, and return its words."""

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_prune.common.errors import UserError


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The line of the UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
