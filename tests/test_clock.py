"""How long a test takes says nothing of the code: a machine may do other work too."""

from itertools import count

import pytest
from hypothesis import HealthCheck, settings

from ckpt_prune.common.progress import meter, track


@pytest.mark.parametrize("chosen", [settings(), settings(max_examples=3)])
def test_no_example_has_a_deadline(chosen):
    assert chosen.deadline is None
    assert HealthCheck.too_slow in chosen.suppress_health_check


def test_commands_print_no_line_because_they_take_long(monkeypatch, capsys):
    """Ten minutes pass at each look at the clock."""
    monkeypatch.setattr("time.monotonic", count(0, 600).__next__)
    assert list(track("abc", "pruning")) == ["a", "b", "c"]
    with meter(2, "learning") as bar:
        bar.step(1, 0.5)
    assert capsys.readouterr().err == ""
