"""One-line `repr` for large results."""


def short_repr(result: object, **fields: object) -> str:
    """Return the class name of a result with some fields, without those that are None.

    >>> short_repr(KeyError(), path="OUT", error=None)
    "KeyError(path='OUT')"
    """
    shown = ", ".join(f"{name}={value!r}" for name, value in fields.items() if value is not None)
    return f"{type(result).__name__}({shown})"
