"""What processes need the same of to compute the same."""

import platform
from importlib.metadata import version

from ckpt_prune._version import __version__


def versions() -> dict[str, str]:
    """Program → version in this process."""
    found = {f"version of {name}": version(name) for name in ("torch", "transformers")}
    return {"version of ckpt-prune": __version__, **found, "version of Python": platform.python_version()}
