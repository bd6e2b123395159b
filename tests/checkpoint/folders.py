"""Tiny checkpoint folders and hand-made safetensors bytes for the tests of this room."""

import json
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter, Layout

CONFIG = {"model_type": "llama", "hidden_size": 4, "transformers_version": "5.0.0"}


def example_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed.weight": torch.randn(7, 5),
        "model.layers.0.up.weight": torch.randn(6, 5).bfloat16(),
        "model.layers.0.down.weight": torch.randn(5, 6).half(),
        "model.layers.1.scale": torch.tensor(2.5, dtype=torch.float64),
        "model.layers.1.empty": torch.zeros(0, 3),
        "model.layers.1.steps": torch.arange(4),
    }


def save_single(folder: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_sharded(folder: Path, tensors: dict[str, Tensor], shards: int = 2) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file, metadata={"format": "pt", "shard": str(number)})
        weight_map.update(dict.fromkeys(part, file))
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw(header: str | bytes, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def layout_of(files: dict[str, dict[str, Tensor]]) -> Layout:
    return {
        file: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for file, tensors in files.items()
    }


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and as_bytes(a) == as_bytes(b)


@contextmanager
def writing(
    out: Path,
    layout: Layout,
    *,
    job: str = "job",
    sharded: bool,
    aside: Set[str] = frozenset(),
    metadata: dict[str, str] | None = None,
    transposed: Set[str] = frozenset(),
    **options: Any,
) -> Iterator[CheckpointWriter]:
    """A writer into the staging folder of `out`."""
    with Staging(out, job=job, **options) as staging:
        yield CheckpointWriter(staging, layout, sharded=sharded, aside=aside, metadata=metadata, transposed=transposed)
