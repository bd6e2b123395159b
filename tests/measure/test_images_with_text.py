"""Statistics of text parts on conversations with images, against hooks in the stock model that reads both."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Pix2StructForConditionalGeneration, PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.image_files import ImageFiles
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.image_text import ImageTextWindows, Reader, pack_windows
from ckpt_prune.measure.samples.samples import SampleRange, SpreadSamples, TokenWindows, scored_tokens
from ckpt_prune.measure.samples.tower_images import TowerImages
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.measure.streams.recorders import HandedAlone, Recorders
from ckpt_prune.measure.streams.state_memory import allocate_in_memory
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from tests.images import write_image
from tests.pairs import choose_cases
from tests.refusals import refusal
from tests.talks import NEEDS, READERS, WINDOW, WINDOWS, write_rows, write_talker
from tools.families import write_tiny

FEW = 6


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


def open_talker(folder: Path, model_type: str, rows: Path) -> tuple[PreTrainedModel, Model, ImageTextWindows]:
    whole = write_talker(folder, model_type)
    model = open_model(str(folder), Opening(part="text"))
    assert model.checkpoint.within is not None
    reader = Reader(model.checkpoint.within.whole, trust=False)
    window = WINDOWS.get(model_type, WINDOW)
    samples = pack_windows(reader, rows, samples=FEW, window=window, seed=0, config=model.config)
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
    lengths = torch.full((len(samples),), samples.tokens) if samples.lengths is None else samples.lengths
    kept = torch.cat([torch.arange(samples.tokens) < length for length in lengths])
    return {path: torch.cat(parts)[kept] for path, parts in seen.items()}


@pytest.mark.parametrize(
    "model_type", choose_cases(list(READERS), lambda each: each not in ("paddleocr_vl", "aya_vision"))
)
def test_moments_are_those_of_the_whole_model(model_type: str, rows: Path, tmp_path: Path) -> None:
    """Sums in float32 of 384 products in another order: 384 · 2⁻²⁴ of the largest, and as much again for each block.

    On the same tokens without images, sums are others.
    """
    if find_spec(NEEDS.get(model_type, "torch")) is None:
        pytest.skip(f"the processor of {model_type} imports {NEEDS[model_type]}, which is not installed")
    whole, model, samples = open_talker(tmp_path, model_type, rows)
    assert not samples.scored.all()
    cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    stream, blind = (open_stream(model, each, **cpu) for each in (samples, TokenWindows(samples.windows)))
    part = load_composite(whole.config.to_dict()).part("text")
    outer = {block: part.outer_name(f"{model.family.layers}.{block}.mlp.down_proj") for block in range(model.blocks)}
    expected = hook_inputs(whole, samples, list(outer.values()))
    for block in range(model.blocks):
        ((moments,),) = stream.observe(block, model.read_block(block), {"mlp": True}, advance=True).values()
        assert isinstance(moments, Moments)
        assert moments.gram is not None
        read = expected[outer[block]]
        assert isinstance(moments, Moments)
        gram = read.T @ read
        assert moments.count == len(read)
        bound = (1 + block) * len(read) * 2**-24 * float(gram.abs().max())
        torch.testing.assert_close(moments.gram.double(), gram, rtol=0, atol=bound)
        if block == 0:
            ((of_text,),) = blind.observe(block, model.read_block(block), {"mlp": True}).values()
            assert (of_text.gram.double() - gram).abs().max() > 100 * bound


def write_patches(folder: Path) -> PreTrainedModel:
    """Save a tiny pix2struct, whose encoder is handed patches behind their places by its own forward pass."""
    write_tiny("pix2struct", None, folder)
    settings = {"image_processor_type": "Pix2StructImageProcessor", "patch_size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Pix2StructForConditionalGeneration.from_pretrained(folder)


def test_a_processor_of_whole_images_is_refused_where_a_tower_reads_patches_and_their_places(tmp_path: Path) -> None:
    write_tiny("gemma4", None, tmp_path)
    model, options = open_model(str(tmp_path), Opening(part="vision")), SampleOptions(images=[tmp_path])
    write_image(tmp_path / "0.png", 1, (16, 16))
    assert refusal(choose_samples, model, options, say=print) == (
        f"{tmp_path / 'preprocessor_config.json'}: ViTImageProcessor makes whole images of one size, and "
        "Gemma4VisionModel reads pixel_position_ids beside images, as Gemma4ImageProcessor makes: put the model's own "
        "file in its place"
    )


@pytest.mark.parametrize(
    ("write", "tower", "down", "padding"),
    [
        (
            partial(write_talker, model_type="gemma4"),
            "model.vision_tower",
            "mlp.down_proj.linear",
            "pixel_position_ids",
        ),
        (write_patches, "encoder", "mlp.wo", "attention_mask"),
    ],
    ids=["gemma4", "pix2struct"],
)
def test_padding_of_images_is_not_counted(
    write: Callable[[Path], PreTrainedModel], tower: str, down: str, padding: str, tmp_path: Path
) -> None:
    """Gemma 4's processor fills an image of 256 patches up to 280, that of pix2struct any up to 2048."""
    whole, images = write(tmp_path / "source"), [tmp_path / f"{side}.png" for side in (16, 32)]
    for image in images:
        write_image(image, 1, (16, int(image.stem)))
    model = open_model(str(tmp_path / "source"), Opening(part="vision"))
    samples = TowerImages(ImageFiles(tuple(images)), load_processor(tmp_path / "source"), model)
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32)
    ((moments,),) = stream.observe(0, model.read_block(0), {"mlp": True}).values()
    seen: list[Tensor] = []
    blocks = f"{tower}.{model.family.layers}"
    last: nn.Module = whole.get_submodule(f"{blocks}.0.{down}")
    last.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    filled = 0
    with torch.no_grad():
        for row in range(2):
            inputs = samples.batch(slice(row, row + 1))
            whole.get_submodule(tower)(**inputs)
            is_token = inputs[padding].gt(0) if padding.endswith("mask") else inputs[padding].ge(0).all(-1)
            filled += int((~is_token).sum())
            seen[-1] = seen[-1][is_token]
    read = torch.cat(seen).double()
    assert moments.count == len(read)
    assert filled
    torch.testing.assert_close(moments.gram.double(), read.T @ read, rtol=1e-4, atol=1e-3)


def test_losses_count_the_tokens_of_text(rows: Path, tmp_path: Path) -> None:
    """The loss behind the blocks is that of the whole model; float32 logits differ by a few units in the last place."""
    whole, model, samples = open_talker(tmp_path, "qwen3_vl", rows)
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32)
    for block in range(model.blocks):
        stream.advance(block, model.read_block(block))
    score = perplexity(whole, samples)
    assert score.tokens == int(samples.scored[:, 1:].sum())
    assert stream.measure_nll() == pytest.approx(score.nll, rel=1e-4)
    some = SpreadSamples(SampleRange(samples, 1, FEW), 2)
    scored = scored_tokens(some, slice(0, 2))
    assert scored is not None
    assert torch.equal(scored, samples.scored[[1, 3]])


def test_predictions_of_images_have_no_gradient(rows: Path, tmp_path: Path) -> None:
    _, model, samples = open_talker(tmp_path, "llava", rows)
    stream = open_stream(model, samples, device=torch.device("cpu"), compute_dtype=torch.float32)
    readout, part = stream.readout(), slice(0, 2)

    def draw(scored: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        (drawn,) = readout.gradients(samples.batch(part), stream.states[part], generator, scored)
        return drawn.values

    all_of_them, scored = draw(None), samples.scored[part]
    assert torch.equal(draw(torch.ones_like(scored)), all_of_them)
    of_text = draw(scored)
    assert not of_text[:, :-1][~scored[:, 1:]].any()
    share = (WINDOW / (scored[:, 1:].sum(1) + 1)).sqrt()[:, None, None]
    expected = (all_of_them * share)[:, :-1][scored[:, 1:]]
    torch.testing.assert_close(of_text[:, :-1][scored[:, 1:]], expected, rtol=2**-20, atol=1e-7)


class Between(nn.Module):
    """Two blocks, with something done to what the first one returns."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.change = nn.ModuleList([nn.Identity(), nn.Identity()]), change

    def forward(self, states: Tensor) -> Tensor:
        return self.layers[1](self.change(self.layers[0](states)))  # type: ignore[no-any-return]


def test_what_is_added_between_blocks_is_handed_on() -> None:
    states, added = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    model = Between(lambda states: states + added)
    recorders = Recorders(list(model.layers), [], "toy", adds=True)
    recorders.run(lambda: model(states))
    first, second = recorders.handed
    assert first.added is None
    assert torch.equal(second.added, added)  # type: ignore[arg-type]
    handed = HandedAlone(allocate_in_memory, "toy")
    handed.keep(slice(0, 1), recorders.handed)
    assert torch.equal(handed.call(nn.Identity(), 1, states, slice(0, 1), 1), states + added)


def test_samples_may_stand_behind_streams() -> None:
    """Gemma 3n's states are (streams, samples, tokens, hidden), and every sample is run by itself."""
    states, handed = torch.randn(4, 2, 3, 5), HandedAlone(allocate_in_memory, "toy")
    handed.axis = 1
    for row in range(2):
        model = Between(lambda states: states)
        recorders = Recorders(list(model.layers), [], "toy")
        recorders.run(lambda model=model, row=row: model(states[:, row : row + 1]))
        handed.keep(slice(row, row + 1), recorders.handed)
    seen: list[Tensor] = []
    block = nn.Identity()
    block.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    assert torch.equal(handed.call(block, 0, states, slice(0, 2), 2), states)
    assert [each.shape for each in seen] == [(4, 1, 3, 5)] * 2


def test_more_than_adding_between_blocks_is_refused() -> None:
    model = Between(lambda states: 2 * states)
    recorders = Recorders(list(model.layers), [], "toy", adds=True)
    with pytest.raises(UserError, match="something changes the hidden states between them"):
        recorders.run(lambda: model(torch.randn(1, 3, 4)))
