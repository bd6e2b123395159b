"""Axes: from values to pixels, and the numbers to write beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_FROM = 20
"""Positive values are drawn on a log scale if the largest is this many times the smallest."""
# A log axis reaches this far down from its largest value: what is smaller is rounding, and would flatten the rest.
_DEPTH = 1e-6
_MOST_TICKS = 8
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """One direction of a plot.

    Attributes:
        low, high: values at its ends.
        start, end: pixels at its ends.
        ticks: values to mark, ascending.
        labels: what to write at them.
        log: whether equal ratios, not equal differences, are equally far apart.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; one that lies below the axis is drawn at its low end."""
        value = max(value, self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def shows(self, value: float) -> bool:
        """Return True if the value does not lie below the axis."""
        return value >= self.low


def value_axis(
    values: Sequence[float], start: float, end: float, *, full: tuple[float, float] | None = None, log: bool = True
) -> Axis:
    """Return the axis for finite values.

    Args:
        values: at least one.
        start, end: pixels at its ends.
        full: a range that it covers in any case; it is then linear.
        log: whether it may be logarithmic, which it is if the positive values span `LOG_FROM`. Zeros and values more
            than six decades below the largest then lie below the axis.
    """
    positive = [value for value in values if value > 0]
    if log and full is None and positive and min(values) >= 0 and max(positive) >= LOG_FROM * min(positive):
        return _log_axis(max(min(positive), max(positive) * _DEPTH), max(positive), start, end)
    low, high = min(0.0, *values), max(0.0, *values)
    if full is not None:
        low, high = min(low, full[0]), max(high, full[1])
    # Differences below what floats can divide are none.
    if high - low < 1e-300:
        low, high = 0.0, 1.0
    step = _round_up((high - low) / 6)
    # The slack keeps 0.6 / 0.2 = 2.9999999999999996 from adding or losing a tick.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(n * step for n in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], start, end, ticks, tuple(tick_label(tick, step) for tick in ticks))


def block_axis(first: int, last: int, start: float, end: float, *, digit: float) -> Axis:
    """Return the axis of block numbers, with half a block free at both ends: whole numbers, as many as can be read.

    Args:
        first, last: block numbers.
        start, end: pixels at its ends.
        digit: pixels that a digit takes.
    """
    low, high = first - 0.5, last + 0.5
    pitch = (end - start) / (high - low)
    needed = digit * (len(str(last)) + 1.5)
    step = 1
    while step * pitch < needed:  # 1, 2, 5, 10, 20, 50, ...
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    ticks = range(-(-first // step) * step, last + 1, step)
    return Axis(low, high, start, end, tuple(map(float, ticks)), tuple(map(str, ticks)))


def tick_label(value: float, step: float) -> str:
    """Format a tick with the digits that its step needs: plain if that is short, else as a power of ten."""
    if value == 0:
        return "0"
    digits = -math.floor(math.log10(step) + 1e-9)
    if -4 <= math.floor(math.log10(abs(value))) < 5 and digits <= 4:
        return f"{value:.{max(digits, 0)}f}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    mantissa = f"{value / 10**exponent:.{max(digits + exponent, 0)}f}"
    power = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def _log_axis(least: float, most: float, start: float, end: float) -> Axis:
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    # From the last 1, 2 or 5 at or below the least value to the first at or above the largest.
    grid = [mantissa * 10.0**decade for decade in decades for mantissa in (1, 2, 5)]
    low = max(value for value in grid if value <= least * (1 + 1e-9))
    high = min(value for value in grid if value >= most * (1 - 1e-9))
    ticks = [value for value in grid if low <= value <= high]
    if len(ticks) > _MOST_TICKS:
        ticks = [value for value in (10.0**decade for decade in decades) if low <= value <= high]
    return Axis(low, high, start, end, tuple(ticks), tuple(tick_label(tick, tick) for tick in ticks), log=True)


def _round_up(step: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(mantissa * power for mantissa in (1, 2, 5, 10) if mantissa * power >= step * (1 - 1e-9))
