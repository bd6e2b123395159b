"""SHA-256 of files and of checkpoints."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import open_input
from ckpt_prune.checkpoint.json_files import canonical_json
from ckpt_prune.checkpoint.shard import CODES, TensorInfo, read_bytes

_TOKENIZER_FILES = (
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
"""Settings of all that prepares a model's input; where it has a part `image_processor`, transformers 5 takes that."""
READER_FILES = (*_TOKENIZER_FILES, PROCESSOR, PROCESSOR_OF_ALL)
"""What decides how data becomes a model's input."""
_EDGE_BYTES = 4096
_PIECE_BYTES = 256
_PIECES = 16


def sha256_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hex SHA-256 of each named file of `folder`, read as a stream."""
    digests = {}
    for name in names:
        with open_input(folder / name) as handle:
            digests[name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return digests


def find_changed_files(folder: Path, recorded: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """What became of files since their digests were taken.

    Args:
        folder: of them.
        recorded: hex SHA-256 by name.

    Returns:
        The first that is gone, and nothing else then: or None, and those that changed, in the order of `recorded`.
    """
    for name in recorded:
        if not (folder / name).is_file():
            return name, []
    return None, [name for name, digest in sha256_files(folder, recorded).items() if digest != recorded[name]]


def tokenizer_fingerprint(path: Path) -> str | None:
    """Hex SHA-256 over the names and contents of the tokenizer files in folder `path`; None where there are none."""
    present = [name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not present:
        return None
    return hashlib.sha256(canonical_json(sha256_files(path, present)).encode()).hexdigest()


def processor_fingerprint(path: Path) -> str | None:
    """Hex SHA-256 over the names and contents of the files in folder `path` that set up the image processor.

    None where there are none.
    """
    present = [name for name in (PROCESSOR, PROCESSOR_OF_ALL) if (path / name).is_file()]
    return hashlib.sha256(canonical_json(sha256_files(path, present)).encode()).hexdigest() if present else None


_OF_LOADING = ("transformers_version", "auto_map", "transformers_weights")


def checkpoint_fingerprint(path: Path, config: dict[str, Any], tensors: Iterable[TensorInfo]) -> str:
    """Hex SHA-256 that tells a checkpoint from its fine-tuned siblings without reading all of it.

    Hashed, in this order: the canonical JSON of `config` without keys that say nothing of the function (`_OF_LOADING`);
    then for each tensor on disk, by name: name, dtype, shape and a sample of its bytes. The sample is all of them up to
    12,288 bytes; beyond, the first 4,096, sixteen evenly spaced pieces of 256, and the last 4,096. An edit of a few
    elements of a large tensor can therefore go unseen. How the tensors are spread over files does not matter.
    """
    kept = {key: value for key, value in config.items() if key not in _OF_LOADING}
    digest = hashlib.sha256(canonical_json(kept).encode())
    stored = (part for info in tensors for part in info.parts)
    for info in sorted(stored, key=lambda info: info.name):
        digest.update(canonical_json([info.name, CODES[info.dtype], info.stored_shape]).encode())
        with open_input(path / info.file) as handle:
            for start, count in _sample(info.nbytes):
                digest.update(read_bytes(handle, info, start, count))
    return digest.hexdigest()


def _sample(nbytes: int) -> Iterator[tuple[int, int]]:
    """The (start, count) ranges of a tensor of `nbytes` that are hashed."""
    if nbytes <= 2 * _EDGE_BYTES + _PIECES * _PIECE_BYTES:
        yield 0, nbytes
        return
    yield 0, _EDGE_BYTES
    for piece in range(_PIECES):
        yield piece * (nbytes - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES
    yield nbytes - _EDGE_BYTES, _EDGE_BYTES
