"""Models of images whose blocks stand in stages of their own widths: found, pruned stage after stage, verified."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    HieraConfig,
    HieraForImageClassification,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)

from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.family_keys import Multiple
from tests.cli.running import edit_weights, ok, run
from tests.encoders import Pixels
from tests.images import write_images, write_processor

IMAGE = 32


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    torch.manual_seed(0)
    sizes = {"embed_dim": 24, "depths": [1, 2], "num_heads": [3, 6], "window_size": 4, "image_size": IMAGE}
    SwinForImageClassification(SwinConfig(**sizes, initializer_range=0.3)).save_pretrained(folder / "swin")
    sizes = {"num_encoder_blocks": 2, "depths": [2, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]}
    sizes |= {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [4, 4]}
    SegformerForImageClassification(SegformerConfig(**sizes, initializer_range=0.3)).save_pretrained(
        folder / "segformer"
    )
    sizes = {"embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2], "num_query_pool": 1, "image_size": [IMAGE, IMAGE]}
    sizes |= {"masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "drop_path_rate": 0.0}
    HieraForImageClassification(HieraConfig(**sizes, initializer_range=0.3)).save_pretrained(folder / "hiera")
    for name in ("swin", "segformer", "hiera"):
        write_processor(folder / name, size={"height": IMAGE, "width": IMAGE})
    write_images(folder / "images", [f"{number}.png" for number in range(8)])
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch, tmp_path_factory) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "families"))


def _mlps(model) -> list[tuple[torch.nn.Linear, torch.nn.Linear]]:
    blocks = (module for path, module in model.named_modules() if path.endswith(".mlp"))
    return [(block.fc1, block.fc2) for block in blocks]


COLUMNS = [("swin", "mlp_ratio", 3.0), ("segformer", "mlp_ratios", [3, 3]), ("hiera", "mlp_ratio", 3.0)]


@pytest.mark.parametrize(("name", "key", "stated"), COLUMNS)
@torch.no_grad()
def test_columns_of_all_stages_go_and_the_config_states_it(name, key, stated):
    """What stays computes what the whole model computes with the other columns at zero.

    Segformer's columns each pass a convolution of their own.
    """
    ok("prune", name, "--recipe", "magnitude", "--ratio", "0.25", "-o", f"{name}-out")
    ok("verify", f"{name}-out", "--against", name)
    config = json.loads(Path(f"{name}-out/config.json").read_text())
    assert (config[key], "auto_map" in config) == (stated, False)
    pruned, loading = AutoModelForImageClassification.from_pretrained(f"{name}-out", output_loading_info=True)
    assert not any(loading.values())
    dense = AutoModelForImageClassification.from_pretrained(name).double().eval()
    images = torch.randn(2, 3, IMAGE, IMAGE, dtype=torch.float64)
    before = dense(images).logits
    for (inner, outer), (kept, _) in zip(_mlps(dense), _mlps(pruned), strict=True):
        stays = (inner.weight[:, None] == kept.weight.double()).all(-1).any(1)
        assert int(stays.sum()) == 3 * len(outer.weight)
        outer.weight[:, ~stays] = 0
    after = pruned.double().eval()(images).logits
    torch.testing.assert_close(after, dense(images).logits, rtol=0, atol=1e-12)
    assert (after - before).abs().max() > 1e-3


@torch.no_grad()
def test_blocks_behind_one_that_makes_fewer_and_wider_rows():
    """In Hiera's stages the blocks enter the stream as they do in the stock model, to the last bit."""
    images = Pixels(torch.randn(4, 3, IMAGE, IMAGE), tokens=64)
    whole = AutoModelForImageClassification.from_pretrained("hiera").eval()
    for stage, shapes in enumerate(([(64, 16)], [(64, 16), (16, 32)])):
        layers = whole.hiera.encoder.stages[stage].layers
        expected: list[torch.Tensor] = []
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, given, seen=expected: seen.append(given[0]))
        logits = whole(**images.batch(slice(0, 4))).logits
        model = open_model("hiera", Opening(part=f"stage{stage + 1}"))
        stream = open_stream(model, images, device=torch.device("cpu"), compute_dtype=torch.float32)
        assert [tuple(states.shape[1:]) for states in expected] == shapes
        for block, states in enumerate(expected):
            assert torch.equal(stream.states, states)
            stream.advance(block, model.read_block(block))
        (ours,) = stream.readout().outputs(images.batch(slice(0, 4)), stream.states)
        assert torch.equal(ours, logits)


@pytest.mark.parametrize("name", ["swin", "hiera"])
@pytest.mark.parametrize(("recipe", "options"), [("laco-flap", ("--ratio", "0.5")), ("sparsegpt", ())])
def test_what_is_trained_or_masked_in_two_stages_is_verified(name, recipe, options):
    ok("prune", name, "--recipe", recipe, *options, "--images", "images", "--samples", "8", "-o", "out", "--overwrite")
    ok("verify", "out", "--against", name)
    edit_weights("out", lambda tensors: tensors["classifier.weight"].mul_(2))
    checks = run("verify", "out", "--against", name).stdout
    assert re.findall(r"^(.*?) +FAILED$", checks, re.MULTILINE) == ["digests", "other parts"]


def test_a_stage_that_shares_its_width_does_not_go_alone_and_keeps_its_blocks():
    data = ("--images", "images", "--samples", "4")
    alone = run("prune", "swin", "--part", "stage2", "--recipe", "magnitude", "--ratio", "0.25", "-o", "alone")
    assert "mlp_ratio of swin states the width of all stacks of blocks" in alone.stderr
    depth = run("prune", "swin", "--recipe", "depth", *data, "-o", "alone")
    assert "drops whole blocks, and --part stage1" in depth.stderr
    found = run("prune", "swin", "--recipe", "best-uniform", *data, "-o", "alone")
    assert "finds a width for each stack of blocks, and mlp_ratio of swin states one for all" in found.stderr
    width = run("prune", "segformer", "--recipe", "magnitude", "--ratio", "0.3", "-o", "alone")
    assert "segformer knows only mlp widths of 16, 32, 48, not 44. Say --container padded" in width.stderr
    assert not Path("alone").exists()


@pytest.mark.parametrize(("hidden", "width"), [(96, 384), (96, 43), (49, 129), (7, 3)])
def test_a_fraction_of_the_hidden_size_is_rounded_down_to_the_width(hidden, width):
    multiple = Multiple(key="mlp_ratio", fraction=True)
    assert multiple.width(hidden, multiple.ratio(hidden, width)) == width


def test_every_width_has_a_fraction():
    multiple = Multiple(key="mlp_ratio", fraction=True)
    sizes = [(hidden, width) for hidden in range(1, 200) for width in range(1, 4 * hidden)]
    assert [own for own in sizes if multiple.width(own[0], multiple.ratio(*own)) != own[1]] == []
