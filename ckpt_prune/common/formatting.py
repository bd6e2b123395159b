"""Numbers as people read them."""


def human_bytes(count: int) -> str:
    """Bytes in binary units with three significant digits: `human_bytes(13_476_839_424)` is `12.6 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ")


def human_count(count: int) -> str:
    """A count in thousands, millions, billions: `human_count(6_738_415_616)` is `6.74B`."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T"), "")


def _scaled(count: int, base: int, suffixes: tuple[str, ...], gap: str) -> str:
    power = 0
    # Compare what would be printed, not the raw value: 999,999 is "1.00M", never "1000K".
    while power < len(suffixes) - 1 and round(abs(count) / base**power) >= base:
        power += 1
    if power == 0:
        return f"{count}{gap}{suffixes[0]}".rstrip()
    value = count / base**power
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}{gap}{suffixes[power]}"


def counted(number: int | None, what: str) -> str:
    """Such as "1 image", "2 images"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds in words, with two significant digits at most."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 99.5 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.2g} h"


def told_apart(value: float, limit: float, form: str, digits: int) -> tuple[str, str]:
    """Two numbers in at least `digits` digits behind the point, and in as many as tell them from each other.

    Args:
        value: what was found.
        limit: what it is held against.
        form: a letter of Python's formats, such as `e` or `%`.
        digits: that are enough for numbers that are far apart.
    """
    for more in range(digits, 17):
        found = f"{value:.{more}{form}}", f"{limit:.{more}{form}}"
        if found[0] != found[1]:
            return found
    return f"{value:.{digits}{form}}", f"{limit:.{digits}{form}}"
