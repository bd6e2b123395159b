"""Models of images whose blocks stand in stages of their own widths: found, pruned stage after stage, verified."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    HieraConfig,
    HieraForImageClassification,
    PvtConfig,
    PvtForImageClassification,
    SegformerConfig,
    SegformerForImageClassification,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
)

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.composites import extract_part
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.family_keys import Multiple
from ckpt_prune.model.model import Model
from ckpt_prune.onnx.tasks import choose_task
from tests.cli.running import edit_weights, ok, read_refusal, run, set_config
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
    segformer = SegformerConfig(**sizes, initializer_range=0.3)
    SegformerForImageClassification(segformer).save_pretrained(folder / "segformer")
    SegformerForSemanticSegmentation(segformer).save_pretrained(folder / "segmenter")
    sizes = {
        key: sizes[key] for key in ("num_encoder_blocks", "depths", "hidden_sizes", "num_attention_heads", "mlp_ratios")
    }
    sizes |= {"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2], "image_size": IMAGE}
    PvtForImageClassification(PvtConfig(**sizes, initializer_range=0.3)).save_pretrained(folder / "pvt")
    sizes = {"embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2], "num_query_pool": 1, "image_size": [IMAGE, IMAGE]}
    sizes |= {"masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "drop_path_rate": 0.0}
    HieraForImageClassification(HieraConfig(**sizes, initializer_range=0.3)).save_pretrained(folder / "hiera")
    for name in ("swin", "segformer", "hiera", "pvt"):
        write_processor(folder / name, size={"height": IMAGE, "width": IMAGE})
    write_images(folder / "images", [f"{number}.png" for number in range(8)])
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)


def _mlps(model) -> list[tuple[torch.nn.Linear, torch.nn.Linear]]:
    blocks = (module for path, module in model.named_modules() if path.endswith(".mlp"))
    return [(block.fc1, block.fc2) for block in blocks]


COLUMNS = [("swin", "mlp_ratio", 3.0), ("segmenter", "mlp_ratios", [3, 3]), ("hiera", "mlp_ratio", 3.0)]


@pytest.mark.parametrize(("name", "key", "stated"), COLUMNS)
@torch.no_grad()
def test_columns_of_all_stages_go_and_the_config_states_it(name, key, stated):
    """The pruned model computes the same as the whole one whose other columns are zero.

    Segformer's columns each pass a convolution of their own.
    """
    ok("prune", name, "--recipe", "magnitude", "--ratio", "0.25", "-o", f"{name}-out")
    assert "not compared" not in ok("verify", f"{name}-out", "--against", name)
    remedy = "`evaluate --segmentation MAPS` or `--depth MAPS` measures one that tells of every pixel"
    assert name != "segmenter" or read_refusal("evaluate", name, "--images", "images").endswith(remedy)
    config = json.loads(Path(f"{name}-out/config.json").read_text())
    assert (config[key], "auto_map" in config) == (stated, False)
    auto = AutoModelForSemanticSegmentation if name == "segmenter" else AutoModelForImageClassification
    pruned, loading = auto.from_pretrained(f"{name}-out", output_loading_info=True)
    assert not any(loading.values())
    dense = auto.from_pretrained(name).double().eval()
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
    assert not Path("alone").exists()


def test_the_default_recipe_is_ridge_where_stages_share_a_width():
    data = ("--images", "images", "--samples", "4", "--evaluate-samples", "0")
    printed = run("prune", "swin", *data, "-o", "default")
    assert printed.exit_code == 0
    found = "recipe best-uniform finds a width for each stack of blocks, and mlp_ratio of swin states one for all"
    assert printed.stderr.splitlines().count(f"{found}: recipe ridge takes its place") == 1
    ok("prune", "swin", "--recipe", "ridge", *data, "-o", "ridge")
    weights = "model.safetensors"
    assert Path("default", weights).read_bytes() == Path("ridge", weights).read_bytes()
    checked = ok("verify", "default", "--against", "swin")
    assert "sparsity: no mask recorded\n" in ok("verify", "swin")
    assert "FAILED" not in checked
    rows = [line.rpartition("  ")[0].strip() for line in checked.splitlines() if line.startswith("kept units (")]
    assert [*filter(None, rows)] == ["kept units (stage2)", "kept units (stage1)"]


WIDTHS = ("prune", "segformer", "--recipe", "magnitude", "--ratio")


@pytest.mark.parametrize(("ratio", "kept"), [("0.2", 3), ("0.3", 3), ("0.4", 2)])
def test_widths_are_in_steps_that_the_config_can_state(ratio, kept):
    for container in ("auto", "any"):
        printed = ok(*WIDTHS, ratio, "--container", container, "-o", "steps", "--dry-run")
        assert f"mlp {16 * kept}/64" in printed
        assert f"mlp {32 * kept}/128" in printed
    assert " 64 x column in steps of 16 " in ok("inspect", "segformer")
    assert "mlp 44/64" in ok(*WIDTHS, "0.3", "--container", "padded", "-o", "steps", "--dry-run")


def test_a_class_that_no_stage_is_found_in_is_refused():
    shutil.copytree("hiera", "other")
    set_config("other", architectures=["HieraForPreTraining"])
    assert read_refusal("inspect", "other") == (
        "config.json names HieraForPreTraining, which is not a known class of hiera; one is HieraForImageClassification"
    )


def test_a_size_is_of_one_stage():
    assert read_refusal("prune", "segformer", "--target-params", "20%", "-o", "small") == (
        "--target-params is of one part: name it with --part stage1 or stage2, or give --ratio, which is of all"
    )


def test_no_code_of_its_own_is_advised_for_a_part():
    """There is none: what is advised works."""
    data = ("--images", "images", "--samples", "4")
    best = run("prune", "segformer", "--recipe", "best", *data, "-o", "alone").stderr
    assert "say --set widths=uniform without --container, or take another recipe, such as ridge" in best
    for recipe in ("best-uniform", "ridge"):
        printed = ok("prune", "segformer", "--recipe", recipe, *data, "-o", "alone", "--dry-run")
        assert "mlp 48/64" in printed
        assert "code of its own" not in printed
    little = ok("prune", "segformer", "--ratio", "0.1", *data, "-o", "alone", "--dry-run")
    assert "mlp: a ratio of 0.1 drops none of 64 in each block in multiples of 16, as its class asks" in little
    numbers = ("--part", "stage1", "--set", "spaces.mlp.keep=[44,44]")
    given = run(*WIDTHS, "0.3", *numbers, "--container", "any", "-o", "alone").stderr.splitlines()[-1]
    assert given == (
        "Error: no stock class fits: segformer knows only mlp widths of 16, 32, 48, not 44. Multiples of 16 are stock "
        "widths of the mlp; --container padded is for a stock class that is filled up with zeros, which saves nothing "
        "there"
    )
    assert not Path("alone").exists()
    assert json.loads(ok("inspect", "segformer", "--part", "stage1", "--json"))["spaces"]["mlp"]["containers"] == {
        "weights": "segformer",
        "weights and bias": "segformer",
    }


@pytest.mark.parametrize("name", ["swin", "segformer", "hiera"])
def test_a_pruned_model_is_exported_as_a_whole(name):
    """Segformer's config states no size of images: the graph reads what the image processor makes."""
    out, folder = f"graph-{name}", f"graph-{name}/onnx"
    ok("prune", name, "--recipe", "magnitude", "--ratio", "0.25", "-o", out)
    ok("export", out, "-o", folder, "--dtype", "fp32", "--dtype", "int8", "--images", "images")
    assert f"the graph agrees with {out} (fp32" in ok("validate", folder, "--images", "images")
    record = json.loads(Path(folder, GRAPH_RECORD).read_text())
    assert [each["inputs"][0]["shape"] for each in record["graphs"]] == [["batch_size", 3, IMAGE, IMAGE]] * 2


def test_a_class_that_reads_any_size_is_traced_at_what_its_processor_makes():
    """Published Segformers state the size of their pretraining, which their class does not read."""
    sizes = {}
    for name in ("segformer", "swin"):
        config = json.loads(Path(name, "config.json").read_text())
        sizes[name] = choose_task(config | {"image_size": 224}, folder=Path(name)).image
    assert sizes == {"segformer": (IMAGE, IMAGE), "swin": None}


KEYS = ("flops", "image")


@pytest.mark.parametrize("name", ["swin", "segformer", "pvt", "hiera"])
def test_flops_are_those_of_the_whole_model_in_every_stage(name):
    """They are those that torch counts while the stock class runs over an image."""
    ok("prune", name, "--recipe", "magnitude", "--ratio", "0.25", "-o", f"flops-{name}")
    counted = []
    for folder in (name, f"flops-{name}"):
        stages = json.loads(ok("inspect", folder, "--json"))["parts"].values()
        (flops,), (image,) = ({tuple(each[key]) if key == "image" else each[key] for each in stages} for key in KEYS)
        model = AutoModelForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 3, *image))
        assert flops == counter.get_total_flops()
        counted.append(flops)
    assert counted[1] < counted[0]


def test_a_class_token_stands_before_the_places_of_a_stage():
    config = json.loads(Path("pvt/config.json").read_text())
    part = extract_part(Checkpoint.open("pvt"), "stage2")
    assert Model.of(part).tokens == (config["image_size"] // 8) ** 2 + 1


@pytest.mark.parametrize(("hidden", "width"), [(96, 384), (96, 43), (49, 129), (7, 3)])
def test_a_fraction_of_the_hidden_size_is_rounded_down_to_the_width(hidden, width):
    multiple = Multiple(key="mlp_ratio", fraction=True)
    assert multiple.width(hidden, multiple.ratio(hidden, width)) == width


def test_every_width_has_a_fraction():
    multiple = Multiple(key="mlp_ratio", fraction=True)
    sizes = [(hidden, width) for hidden in range(1, 200) for width in range(1, 4 * hidden)]
    assert [own for own in sizes if multiple.width(own[0], multiple.ratio(*own)) != own[1]] == []
