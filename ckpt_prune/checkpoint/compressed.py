"""Compressed 2:4 checkpoints: why none are written.

The format (`sparse-24-bitmask`: the two weights of every four that stay, and a bit mask of where they were) was one of
compressed-tensors. Read in its wheels and measured with transformers 5.23.0 on a 2:4 llama:

- compressed-tensors 0.14.0.1 is the last with `Sparse24BitMaskCompressor`; 0.15.0 dropped it (compressed-tensors#610,
  March 2026). 0.20.0 still has the format's name and config class, and nothing that reads or writes it.
- transformers 5.23.0 takes compressed-tensors 0.15.0 or later only (transformers#46342). With 0.20.0 it loads a
  compressed folder with a warning and RANDOM weights in every compressed linear.
- vLLM removed its kernels (vllm#36799, March 2026): 0.19.1 and later refuse such a folder (llm-compressor#2720).
- transformers 4.57.6 with compressed-tensors 0.14.0.1 and accelerate gives every weight back, bit for bit, as dense
  tensors in memory. transformers#46342 also says that this old loader runs code a config.json names.
"""

import importlib
from typing import NoReturn

from ckpt_prune.errors import UserError

_DROPPED = "0.15.0"
"""First compressed-tensors without the compressor, and the oldest that transformers 5.23 takes."""
_COMPRESSOR = "Sparse24BitMaskCompressor"

_INSTEAD = (
    "leave --format out: the plain output loads where the dense model does, and "
    "torch.sparse.to_sparse_semi_structured packs its 2:4 weights on NVIDIA GPUs of compute capability 8.0 or later"
)


def refuse_compressed() -> NoReturn:
    """Refuse `--format compressed`, saying what of compressed-tensors is installed and why it does not do.

    Raises:
        UserError: always: no version that transformers accepts has the compressor.
    """
    try:
        library = importlib.import_module("compressed_tensors")
        compressors = importlib.import_module("compressed_tensors.compressors")
    except ModuleNotFoundError as error:
        if error.name != "compressed_tensors":
            raise UserError(_said(f"compressed-tensors does not import ({error})")) from error
        raise UserError(
            _said(
                "compressed-tensors is not installed, and installing it would not help: it has no 2:4 compressor "
                f"since {_DROPPED} (compressed-tensors#610), and transformers takes no older one"
            )
        ) from error
    except Exception as error:  # whatever an old version runs into beside a new transformers
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(_said(f"compressed-tensors does not import ({reason})")) from error
    installed = getattr(library, "__version__", "(of unknown version)")
    if not hasattr(compressors, _COMPRESSOR):
        raise UserError(
            _said(
                f"compressed-tensors {installed} has no 2:4 compressor: it was dropped in {_DROPPED} "
                "(compressed-tensors#610), and vLLM and transformers no longer read what it wrote"
            )
        )
    raise UserError(
        _said(
            f"compressed-tensors {installed} has a 2:4 compressor, but the transformers that this tool needs (5.23 or "
            f"later) loads with compressed-tensors {_DROPPED} or later only, which had none when this was written"
        )
    )


def _said(reason: str) -> str:
    return f"--format compressed cannot be written: {reason}; {_INSTEAD}"
