"""Values of the key that a sweep goes through."""

from decimal import Decimal

from ckpt_prune.common.errors import UserError
from ckpt_prune.options.commands import SweepOptions

RATIO = "ratio"
"""The key that is swept if none is named."""
OF_DATA = ("samples", "seed")
"""Keys that are no keys of a recipe: how many calibration samples, and which."""
MOST = 1000
"""Most values of one sweep."""


def values_of(options: SweepOptions) -> tuple[str, list[float | str]]:
    """Return the key that a sweep goes through, and its values."""
    values = options.values
    return asked_values(values) if isinstance(values, str) else (RATIO, [float(ratio) for ratio in values])


def keys_of(key: str) -> list[str]:
    """Return the keys of a recipe that have the same value at every point: one, or those that commas part."""
    return key.split(",")


def words(key: str, value: float | str) -> str:
    return f"{key}={value}" if isinstance(value, str) else f"{key}={value:g}"


def asked_values(text: str) -> tuple[str, list[float | str]]:
    """Parse FROM:TO:STEP of ratios, or KEY=A,B,C or KEY=FROM:TO:STEP of another key."""
    key, equals, values = text.rpartition("=")
    if not equals and "," in text:
        return asked_values(f"{RATIO}={text}")
    if not equals:
        return RATIO, [*_ratios(text)]
    if key == RATIO and ":" in values:
        return RATIO, [*_ratios(values)]
    if not key or not values:
        raise UserError(f"--sweep {text}: expected FROM:TO:STEP, or KEY=A,B,C or KEY=FROM:TO:STEP of a recipe's key")
    keys = keys_of(key)
    if len(keys) > 1 and (alone := {RATIO, *OF_DATA} & set(keys)):
        raise UserError(f"--sweep {text}: {min(alone)} varies alone; keys that vary together are keys of the recipe")
    if not all(keys) or len(set(keys)) < len(keys):
        raise UserError(f"--sweep {text}: keys that vary together are named once each, KEY,KEY=A,B,C")
    points: list[float | str] = []
    if values.count(":") == 2:
        points += _steps(text, values, f"--sweep {text}: values go up, in at most {MOST} steps")
    else:
        points += [_number(part.strip()) for part in values.split(",")]
    if key in OF_DATA:
        points = [int(each) if isinstance(each, float) and each.is_integer() else each for each in points]
    if len(set(points)) < len(points):
        raise UserError(f"--sweep {text}: one value is given twice")
    if key == RATIO and not all(isinstance(value, float) for value in points):
        raise UserError(f"--sweep {text}: ratios are numbers")
    return key, points


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _steps(text: str, values: str, refusal: str) -> list[float]:
    """Return the numbers of FROM:TO:STEP, both ends included; `refusal` is the error if they do not go up."""
    try:
        start, stop, step = (Decimal(part) for part in values.split(":"))
        if not all(number.is_finite() for number in (start, stop, step)):
            raise ValueError(text)
        count = int((stop - start) / step) if step > 0 and stop >= start else -1
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"--sweep {text}: expected FROM:TO:STEP, such as 0.1:0.7:0.1") from error
    if not 0 <= count <= MOST:
        raise UserError(refusal)
    return [float(start + index * step) for index in range(count + 1)]


def _ratios(text: str) -> list[float]:
    refusal = f"--sweep {text}: ratios go up from 0 or more to less than 1, in at most {MOST} steps"
    ratios = _steps(text, text, refusal)
    if not (ratios[0] >= 0 and ratios[-1] < 1):
        raise UserError(refusal)
    return ratios
