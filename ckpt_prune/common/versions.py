"""Versions of the programs that compute, for records of how something was made."""

import torch
import transformers

from ckpt_prune._version import __version__


def versions() -> dict[str, str]:
    """Return the versions of this tool, torch and transformers."""
    return {"ckpt_prune": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
