"""Some of many, spread evenly."""


def spread_evenly(count: int, total: int) -> list[int]:
    """Return `count` of the numbers from 0 to total − 1: those in the middle of as many equal parts, ascending."""
    return [(2 * place + 1) * total // (2 * count) for place in range(count)]
