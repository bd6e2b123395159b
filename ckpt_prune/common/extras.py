"""Packages that this one can do without."""


def install(extra: str) -> str:
    """Return the command that installs an extra. It names the checkout: no registry has this package yet."""
    return f'pip install ".[{extra}]" in the checkout of ckpt-prune'
