"""A run frees what it is done with at once: tensors in a circle of references would wait for Python's collector.

On SmolLM2-135M that took 100 MB for every block that was pruned, until it came by.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.cli.running import TEXT, changed, ok
from tests.pairs import every

SHORT = changed(TEXT, "--samples", "8")
LIVE = ("prune", "dense", *SHORT, "-o", "out", "--recipe")
JOBS = {
    "best": (*LIVE, "best", "--ratio", "0.3"),
    "best-attention": (*LIVE, "best-attention", "--ratio", "0.3"),
    "scales": (*LIVE, "ridge", "--ratio", "0.5", "--set", "recovery={method: scales, samples: 4}"),
    "masks": (*LIVE, "wanda-50"),
    "depth": (*LIVE, "depth", "--ratio", "0.5"),
    # Outputs that are measured whole leave circles of transformers' own at the end.
    "slices": (*LIVE, "slicegpt", "--ratio", "0.3", "--evaluate-samples", "0"),
    "shared rotations": (*LIVE, "cayley-rotator-shared-wanda-50", "--set", "rotation.steps=2"),
    "laco": ("recover", "pruned", "--dense", "dense", *SHORT, "--epochs", "1", "-o", "out"),
    "gradients": ("calibrate", "dense", *SHORT, "--collect", "moments,gram,fisher,taylor", "-o", "out"),
    "compare": ("compare", "pruned", "dense", *SHORT),
}


@contextmanager
def circles() -> Iterator[list[object]]:
    gc.collect()
    garbage: list[object] = []
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield garbage
        gc.collect()
        garbage += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("job", every(3, JOBS))
def test_no_tensor_is_left_to_the_collector(place: Path, job: str):
    ok("inspect", "dense")  # what is imported leaves circles of its own
    with circles() as garbage:
        ok(*JOBS[job])
    tensors = [item for item in garbage if isinstance(item, torch.Tensor) and not item.is_meta and item.numel()]
    assert [tuple(tensor.shape) for tensor in tensors] == []
