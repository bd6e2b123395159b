"""Numbers as people read them."""

import math


def human_bytes(count: int) -> str:
    """Format bytes in decimal units with three significant digits: `human_bytes(13_476_839_424)` is `13.5 GB`."""
    return _scale(count, ("B", "KB", "MB", "GB", "TB", "PB"), " ")


def decimal_bytes(count: float) -> str:
    """Format bytes as targets are written, with four digits and rounded up: `decimal_bytes(140_000)` is `140 KB`.

    Who asks for a size that is written so gets no less.
    """
    whole = math.ceil(count)
    step = 10 ** max(0, len(str(whole)) - 4)
    rounded = -(-whole // step) * step
    power = min(4, (len(str(rounded)) - 1) // 3)
    return f"{rounded / 1000**power:.4g} {('bytes', 'KB', 'MB', 'GB', 'TB')[power]}"


def human_count(count: int) -> str:
    """Format a count in thousands, millions, billions: `human_count(6_738_415_616)` is `6.74B`."""
    return _scale(count, ("", "K", "M", "B", "T"), "")


def _scale(count: int, suffixes: tuple[str, ...], gap: str) -> str:
    power = 0
    # Compare what would be printed, not the raw value: 999,999 is "1.00M", never "1000K".
    while power < len(suffixes) - 1 and round(abs(count) / 1000**power) >= 1000:
        power += 1
    if power == 0:
        return f"{count}{gap}{suffixes[0]}".rstrip()
    value = count / 1000**power
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}{gap}{suffixes[power]}"


def plural(number: int | None, noun: str) -> str:
    """Format a count of things, such as "1 image" or "2 images"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Format seconds in one unit, with two significant digits at most."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 99.5 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.2g} h"


def format_share(share: float, style: str, of: int | None) -> str:
    """Format a share of so many samples with its standard error, such as "75.0% ± 10.8%"; without one if `of` is None.

    Args:
        share: 0 to 1; others, as files that were edited may have them, get an error of 0.
        style: of both, such as `.1%`.
    """
    text = format(share, style)
    return text if of is None else f"{text} ± {math.sqrt(max(0.0, share * (1 - share)) / of):{style}}"


def format_distinctly(value: float, limit: float, form: str, digits: int) -> tuple[str, str]:
    """Format a value and its limit with at least `digits` decimals, and more if they would look equal.

    Args:
        value: that was measured.
        limit: that it is compared with.
        form: letter of Python's formats, such as `e` or `%`.
        digits: enough for numbers that are far apart.
    """
    for decimals in range(digits, 17):
        texts = f"{value:.{decimals}{form}}", f"{limit:.{decimals}{form}}"
        if texts[0] != texts[1]:
            return texts
    return f"{value:.{digits}{form}}", f"{limit:.{digits}{form}}"
