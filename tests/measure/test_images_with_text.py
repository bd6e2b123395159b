"""Statistics of text parts on conversations with images, against hooks in the stock model that reads both."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.image_text import ImageTextWindows, Reader, pack_windows
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from tests.talks import READERS, WINDOW, write_rows, write_talker

FEW = 6


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def open_talker(folder: Path, model_type: str, rows: Path) -> tuple[PreTrainedModel, Model, ImageTextWindows]:
    whole = write_talker(folder, model_type)
    model = open_model(str(folder), Opening(part="text"))
    assert model.checkpoint.within is not None
    reader = Reader(model.checkpoint.within.whole, trust=False)
    samples = pack_windows(reader, rows, samples=FEW, window=WINDOW, seed=0, config=model.config)
    return whole, model, samples


def hook_inputs(whole: PreTrainedModel, samples: ImageTextWindows, paths: list[str]) -> dict[str, Tensor]:
    """What linear modules of the whole read of all samples: path → (tokens, inputs) float64."""
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}
    handles = [
        whole.get_submodule(path).register_forward_pre_hook(
            lambda _module, args, path=path: seen[path].append(args[0].flatten(0, 1).double())
        )
        for path in paths
    ]
    with torch.no_grad():
        for row in range(len(samples)):
            whole(**samples.whole_inputs(row), use_cache=False)
    for handle in handles:
        handle.remove()
    return {path: torch.cat(parts) for path, parts in seen.items()}


@pytest.mark.parametrize("model_type", READERS)
def test_moments_are_those_of_the_whole_model(model_type: str, rows: Path, tmp_path: Path) -> None:
    """float32 sums of about 400 tokens, in another order: relative error within √400 · 2⁻²⁴ · 100 of depth two."""
    whole, model, samples = open_talker(tmp_path, model_type, rows)
    assert not samples.scored.all()
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32)
    part = load_composite(model_type).part("text")
    outer = {block: part.outer_name(f"{model.family.layers}.{block}.mlp.down_proj") for block in range(model.blocks)}
    expected = hook_inputs(whole, samples, list(outer.values()))
    for block in range(model.blocks):
        ((moments,),) = stream.observe(block, model.read_block(block), {"mlp": True}, advance=True).values()
        assert isinstance(moments, Moments)
        assert moments.gram is not None
        read = expected[outer[block]]
        assert isinstance(moments, Moments)
        gram = read.T @ read
        assert moments.count == len(read) == FEW * WINDOW
        torch.testing.assert_close(moments.gram.double(), gram, rtol=0, atol=1e-4 * float(gram.abs().max()))
