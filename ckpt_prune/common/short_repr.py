"""What `repr` shows of a result that holds more than anybody reads: its name, and what is worth a glance."""


def glance(result: object, **told: object) -> str:
    """A result in a line.

    Args:
        result: whose class is named.
        told: what of it is shown, by name; what is None is left out.

    >>> glance(KeyError(), path="OUT", error=None)
    "KeyError(path='OUT')"
    """
    known = ", ".join(f"{name}={value!r}" for name, value in told.items() if value is not None)
    return f"{type(result).__name__}({known})"
