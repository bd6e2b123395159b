"""Versions of what computes, for records of how something was made."""

import torch
import transformers

from ckpt_prune._version import __version__


def versions() -> dict[str, str]:
    """Versions of this tool and of what it computes with, for a report."""
    return {"ckpt_prune": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
