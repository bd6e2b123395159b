"""Files of published data sets: where they lie, on this machine or on the Hub, and the rows in them."""

import gzip
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import open_input, read_input
from ckpt_prune.checkpoint.hub_files import fetch_hub_file
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.common.text_encoding import decode_text, parse_json_rows

DATA_VARIABLE = "CKPT_PRUNE_DATA"
_MOST_BYTES = 2**29
"""Size of the largest file that is read from the Hub; the first part of C4's train split has 319 MB."""
_LONGEST_LINE = 2**24


def find_data_file(
    option: Path,
    folder: Path | None,
    name: str,
    local: Sequence[str],
    *,
    repo: str,
    remote: str,
    revision: str | None = None,
) -> Path:
    """Find a file of a data set: a local copy, or else the Hub's, which is downloaded into its cache.

    Args:
        option: the user's words, for messages.
        folder: the only place to look for local copies; None for the folder that `DATA_VARIABLE` names, then the Hub.
        name: of the data set, and of its own folder in there.
        local: patterns of file names; the first that fits is taken.
        repo: data set on the Hub.
        remote: path of the file in `repo`.
        revision: of `repo`.
    """
    places = [folder / name, folder] if folder is not None else []
    if folder is None and (data := os.environ.get(DATA_VARIABLE)):
        places = [Path(data) / name]
    for place in places:
        if file := _find_in(place, local):
            return file
    if folder is not None:
        raise UserError(f"{option}: {folder} has no {' or '.join(local)}")
    try:
        return fetch_hub_file(repo, remote, revision, most=_MOST_BYTES, repo_type="dataset")
    except UserError as error:
        looked = str(places[0].parent) if places else f"{DATA_VARIABLE} names no folder"
        raise UserError(f"{option}: no local copy ({looked}), and {error}") from error


def _find_in(place: Path, patterns: Sequence[str]) -> Path | None:
    for pattern in patterns:
        inside, _, name_pattern = pattern.rpartition("/")
        try:
            names = sorted(file.name for file in (place / inside).iterdir() if fnmatch(file.name, name_pattern))
        except OSError:
            continue
        if names:
            return place / inside / names[0]
    return None


def read_rows(file: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read rows of a parquet file, of an array or lines of JSON, or of these compressed.

    Args:
        file: .parquet, .jsonl, .json or .gz.
        columns: read from parquet; rows of JSON keep all others too.

    Raises:
        OSError, EOFError, ValueError: the file cannot be read as that.
        UserError: pyarrow is missing.
    """
    if file.suffix.lower() == ".parquet":
        yield from _read_parquet(file, columns)
        return
    if file.suffix.lower() == ".json":
        for where, row in parse_json_rows(file, decode_text(file, read_input(file, _MOST_BYTES))):
            try:
                yield parse_json_object(json.dumps(row).encode())
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
        return
    for number, line in enumerate(read_lines(file), start=1):
        if line.strip():
            try:
                yield parse_json_object(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def read_lines(file: Path) -> Iterator[bytes]:
    """Read lines of a file, compressed or not, with their ends.

    Raises:
        OSError, EOFError, ValueError: the file cannot be read, or a line is too long.
    """
    packed = file.suffix.lower() == ".gz"
    with open_input(file) as raw, gzip.open(raw) if packed else open(file, "rb") as handle:  # noqa: PTH123
        while line := handle.readline(_LONGEST_LINE + 1):
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"a line of more than {_LONGEST_LINE} bytes")
            yield line.removeprefix(BOM_UTF8)


def _read_parquet(file: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{file}: reading parquet needs pyarrow: {install('eval')}") from error
    try:
        with open_input(file) as handle:
            for batch in parquet.ParquetFile(handle).iter_batches(columns=list(columns)):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error
