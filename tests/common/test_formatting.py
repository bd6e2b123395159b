import pytest

from ckpt_prune.common.formatting import decimal_bytes, format_distinctly, format_duration, human_bytes, human_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (999_999, "1.00 MB"),
        (13_476_839_424, "13.5 GB"),
        (485_000_000, "485 MB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999 bytes"),
        (140_000, "140 KB"),
        (999_950, "1 MB"),
        (1_184_401, "1.185 MB"),
        (113_174_696, "113.2 MB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes_as_targets_are_written(count: float, text: str) -> None:
    assert decimal_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.00K"), (999_999, "1.00M"), (6_738_415_616, "6.74B")]
)
def test_human_count(count: int, text: str) -> None:
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "1 s"), (1.6, "2 s"), (99.4, "99 s"), (99.6, "2 min"), (5900, "98 min"), (6000, "1.7 h"), (90000, "25 h")],
)
def test_durations(seconds, words):
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "limit", "form", "digits", "text"),
    [
        (0.25, 0.01, "%", 2, ("25.00%", "1.00%")),
        (0.010004, 0.01, "%", 2, ("1.0004%", "1.0000%")),
        (1.04e-5, 1e-5, "e", 1, ("1.04e-05", "1.00e-05")),
        (0.01, 0.01, "%", 2, ("1.00%", "1.00%")),
    ],
)
def test_a_number_and_its_limit_are_told_apart(value, limit, form, digits, text):
    assert format_distinctly(value, limit, form, digits) == text
