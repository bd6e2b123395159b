"""SHA-256 of files and of checkpoints."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import open_input, sha256_files
from ckpt_prune.checkpoint.json_files import canonical_json
from ckpt_prune.checkpoint.shard import CODES, TensorInfo, read_bytes

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
PROCESSOR = "preprocessor_config.json"
"""Settings of an image processor."""
PROCESSOR_OF_ALL = "processor_config.json"
"""Settings of everything that prepares inputs; transformers 5 prefers its part `image_processor` to `PROCESSOR`."""
PROCESSORS = (PROCESSOR, PROCESSOR_OF_ALL)
READER_FILES = (*TOKENIZER_FILES, *PROCESSORS)
"""Files that decide how data becomes a model's input."""
_EDGE_BYTES = 4096
_PIECE_BYTES = 256
_PIECES = 16


def find_changed_files(folder: Path, recorded: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Compare files with their recorded hex SHA-256.

    Returns:
        The first file that is gone, and an empty list; or None, and the files that changed in the order of `recorded`.
    """
    for name in recorded:
        if not (folder / name).is_file():
            return name, []
    return None, [name for name, digest in sha256_files(folder, recorded).items() if digest != recorded[name]]


def tokenizer_fingerprint(path: Path) -> str | None:
    """Return a hex SHA-256 over names and contents of the tokenizer files in a folder; None if there are none."""
    return fingerprint_files({name: path / name for name in TOKENIZER_FILES if (path / name).is_file()})


def processor_fingerprint(path: Path) -> str | None:
    """Return the same over the files that set up the image processor."""
    return fingerprint_files({name: path / name for name in PROCESSORS if (path / name).is_file()})


def fingerprint_files(files: Mapping[str, Path]) -> str | None:
    """Return a hex SHA-256 over names and contents of files, by name; None if there are none."""
    digests = {name: sha256_files(path.parent, [path.name])[path.name] for name, path in files.items()}
    return hashlib.sha256(canonical_json(digests).encode()).hexdigest() if files else None


_LOADING_KEYS = ("transformers_version", "auto_map", "transformers_weights")
"""Keys of config.json that do not change what the model computes."""


def checkpoint_fingerprint(path: Path, config: dict[str, Any], tensors: Iterable[TensorInfo]) -> str:
    """Return a hex SHA-256 that tells a checkpoint from its fine-tuned siblings without reading all of it.

    Hashed, in this order: the canonical JSON of `config` without `_LOADING_KEYS`; then for each tensor on disk, by
    name: name, dtype, shape and a sample of its bytes. The sample is all of them up to 12,288 bytes; beyond, the first
    4,096, sixteen evenly spaced pieces of 256, and the last 4,096. An edit of a few elements of a large tensor can go
    unseen. How the tensors are spread over files does not matter.
    """
    digest = hashlib.sha256(
        canonical_json({key: value for key, value in config.items() if key not in _LOADING_KEYS}).encode()
    )
    tensors = list(tensors)
    for info in sorted((info for info in tensors if info.adapter is not None), key=lambda info: info.name):
        assert info.adapter is not None
        digest.update(canonical_json([info.name, info.adapter.factor]).encode())
    stored = (part for info in tensors for part in info.parts)
    for info in sorted(stored, key=lambda info: info.name):
        digest.update(canonical_json([info.name, CODES[info.dtype], info.stored_shape]).encode())
        with open_input(path / info.file) as handle:
            for start, count in _sample(info.nbytes):
                digest.update(read_bytes(handle, info, start, count))
    return digest.hexdigest()


def _sample(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of the byte ranges of a tensor that are hashed."""
    if nbytes <= 2 * _EDGE_BYTES + _PIECES * _PIECE_BYTES:
        yield 0, nbytes
        return
    yield 0, _EDGE_BYTES
    for piece in range(_PIECES):
        yield piece * (nbytes - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES
    yield nbytes - _EDGE_BYTES, _EDGE_BYTES
