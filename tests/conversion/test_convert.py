"""`convert`: folders of timm and of masked autoencoders as stock classes, against timm's own arithmetic in float64."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
)

import ckpt_prune
from ckpt_prune.checkpoint.writer import CheckpointWriter
from tests.cli.running import ok, read_refusal, run
from tests.encoders import randomise
from tests.families import contents
from tests.images import write_images
from tests.interrupting import interrupt_at
from tests.oracles import timm_vit

HIDDEN, HEADS, DEPTH, MLP, SIDE, PATCH, CLASSES = 16, 4, 2, 24, 12, 4, 3
DATA = {
    "input_size": [3, SIDE, SIDE],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
    "mean": [0.5, 0.4, 0.3],
    "std": [0.5, 0.25, 0.2],
}


def timm(
    folder: Path,
    architecture: str = "vit_tiny_patch4_12",
    *,
    scales: bool = False,
    places: int = 1,
    bias: bool = True,
    classes: int = CLASSES,
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, Tensor]:
    """A folder as timm writes it; its tensors without the prefix."""
    distilled = "_distilled" in architecture
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, HIDDEN),
        "pos_embed": (1, (SIDE // PATCH) ** 2 + places, HIDDEN),
        "patch_embed.proj.weight": (HIDDEN, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "norm.bias": (HIDDEN,),
    }
    heads = ["head", "head_dist"] if distilled else ["head"]
    if distilled:
        shapes["dist_token"] = (1, 1, HIDDEN)
    linears = {"attn.qkv": (3 * HIDDEN, HIDDEN), "attn.proj": (HIDDEN, HIDDEN)}
    linears |= {"mlp.fc1": (MLP, HIDDEN), "mlp.fc2": (HIDDEN, MLP)}
    for block in range(DEPTH):
        for name, shape in linears.items():
            shapes |= {f"blocks.{block}.{name}.weight": shape, f"blocks.{block}.{name}.bias": shape[:1]}
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{name}.weight": (HIDDEN,), f"blocks.{block}.{name}.bias": (HIDDEN,)}
        if scales:
            shapes |= {f"blocks.{block}.ls1.gamma": (HIDDEN,), f"blocks.{block}.ls2.gamma": (HIDDEN,)}
        if not bias:
            del shapes[f"blocks.{block}.attn.qkv.bias"]
    if classes:
        for name in heads:
            shapes |= {f"{name}.weight": (classes, HIDDEN), f"{name}.bias": (classes,)}
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {name: torch.randn(shape, generator=generator).mul(0.4).to(dtype) for name, shape in shapes.items()}
    folder.mkdir()
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    described = {
        "architecture": architecture,
        "num_classes": classes,
        "num_features": HIDDEN,
        "global_pool": "token",
        "pretrained_cfg": DATA,
        "model_args": {"num_heads": HEADS, "embed_dim": HIDDEN, "depth": DEPTH},
    }
    (folder / "config.json").write_text(json.dumps(described | config))
    return tensors


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


KINDS: dict[str, dict[str, Any]] = {
    "vit": {},
    "vit-no-bias": {"bias": False},
    "deit": {"architecture": "deit_small_patch4_12.fb_in1k"},
    "deit3": {"architecture": "deit3_large_patch4_12.fb_in22k_ft_in1k", "scales": True, "places": 0},
    "distilled": {"architecture": "deit_base_distilled_patch4_12", "places": 2},
    "wrapped": {"prefix": "timm_model.", "model_type": "timm_wrapper", "scales": True},
}


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stock_class_computes_what_timm_does(kind: str) -> None:
    stored = timm(Path("timm"), **KINDS[kind])
    conversion = ckpt_prune.convert("timm", output="out")
    assert conversion.model_type == ("deit" if kind == "distilled" else "vit")
    model, info = AutoModelForImageClassification.from_pretrained("out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == conversion.architecture
    assert sum(p.numel() for p in model.parameters()) == conversion.parameters
    with torch.no_grad():
        ours = model.double()(images().double()).logits
    expected = timm_vit.logits(stored, images(), HEADS)
    # Layer scales are rounded into float32 weights; all else is the same numbers.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 if "scales" in KINDS[kind] else 1e-12)


def test_without_a_head_the_tokens_are_the_same() -> None:
    stored = timm(Path("timm"), classes=0)
    conversion = ckpt_prune.convert("timm", output="out")
    assert (conversion.architecture, conversion.parameters) == ("ViTModel", sum(t.numel() for t in stored.values()))
    with torch.no_grad():
        ours = AutoModel.from_pretrained("out").double()(images().double()).last_hidden_state
    torch.testing.assert_close(ours, timm_vit.features(stored, images(), HEADS), rtol=0, atol=1e-12)


def test_images_are_prepared_as_timm_does_to_evaluate() -> None:
    """The shortest edge by the share that is cut out, then the middle."""
    timm(Path("timm"), label_names=["cat", "dog", "owl"])
    ckpt_prune.convert("timm", output="out")
    processor = AutoImageProcessor.from_pretrained("out", backend="pil")
    assert (processor.size["shortest_edge"], processor.crop_size["height"], processor.resample) == (13, SIDE, 3)
    assert (list(processor.image_mean), list(processor.image_std)) == (DATA["mean"], DATA["std"])
    config = json.loads(Path("out/config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "owl"}


def test_what_is_converted_is_pruned() -> None:
    timm(Path("timm"), **KINDS["deit3"])
    assert ok("convert", "timm", "-o", "out") == (
        "out: vit, ViTForImageClassification, 4963 parameters\n"
        "4 layer scales are absorbed by the projections before them\n"
    )
    checks = {check.name: check for check in ckpt_prune.verify("out").checks}
    assert (checks["digests"].passed, checks["digests"].detail) == (True, "3 file(s) as written")
    write_images(Path("photos"), [f"{index}.png" for index in range(6)])
    ok("prune", "out", "--recipe", "corp-mlp", "--ratio", "0.25", "--images", "photos", "-o", "small")
    assert not Path("small/ckpt_prune_converted.json").exists()
    assert json.loads(Path("small/config.json").read_text())["intermediate_size"] == MLP * 3 // 4
    assert ckpt_prune.verify("small", against="out").passed


def test_an_existing_output_is_replaced_when_asked_to() -> None:
    timm(Path("timm"))
    ok("convert", "timm", "-o", "out")
    before = Path("out/model.safetensors").read_bytes()
    assert read_refusal("convert", "timm", "-o", "out").endswith(
        "out exists; --overwrite replaces it, or give another -o"
    )
    ok("convert", "timm", "-o", "out", "--overwrite")
    assert Path("out/model.safetensors").read_bytes() == before
    conversion = json.loads(ok("convert", "timm", "-o", "out", "--overwrite", "--json"))
    assert conversion == {
        "output": "out",
        "model_type": "vit",
        "architecture": "ViTForImageClassification",
        "parameters": 4963,
        "written": True,
        "validation": None,
        "notes": [],
    }


def test_a_killed_run_is_resumed_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    timm(Path("timm"), **KINDS["deit3"])
    ok("convert", "timm", "-o", "whole")
    ok("convert", "timm", "-o", "out")
    job = ("convert", "timm", "-o", "out", "--overwrite")
    with monkeypatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 8)
        assert "out.partial keeps what is done" in run(*job).stderr
    assert "is left from an unfinished run; --resume continues it" in read_refusal(*job[:-1])
    assert "7 of 40 tensors converted" in run(*job[:-1], "--resume").stderr
    assert contents(Path("out")) == contents(Path("whole"))
    # A kill between the swap and the end of deleting what was replaced.
    shutil.copytree("whole", ".out.ckpt_prune-replaced")
    assert "out is finished: nothing is left to do" in run(*job[:-1], "--resume").stderr
    assert {path.name for path in Path().iterdir()} == {"timm", "whole", "out"}


def test_sources_that_cannot_be_converted_are_refused_before_anything_is_written() -> None:
    tensors = timm(Path("timm"))
    assert "overlaps the source" in read_refusal("convert", "timm", "-o", "timm/out")
    tensors["norm.bias"][0] = torch.nan
    save_file(tensors, "timm/model.safetensors")
    assert "norm.bias" in read_refusal("convert", "timm", "-o", "out")
    assert [path.name for path in Path().iterdir()] == ["timm"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architecture": "vit_base_patch16_rope_224"},
        "timm holds timm's vit_base_patch16_rope_224: only plain vit, deit and deit3 (PATCH and image size after their "
        "size, nothing else) compute what a stock class of transformers does",
    ),
    "pooling": (
        {"global_pool": "avg"},
        "timm pools its tokens by global_pool 'avg', where ViT reads the class token",
    ),
    "changed": (
        {"model_args": {"qk_norm": True}},
        "timm changes vit_tiny_patch4_12 by model_args.qk_norm, which is not known to be a ViT",
    ),
    "heads": ({"model_args": {}}, "timm: 3 heads do not divide its hidden size of 16"),
    "positions": ({"places": 3}, "timm has 12 positions for 9 patches and 1 tokens beside them"),
    "token": (
        {"architecture": "deit_tiny_patch4_12", "distilled": True},
        "timm: deit_tiny_patch4_12 and its tensors do not agree on a distillation token",
    ),
    "data": (
        {"pretrained_cfg": {}},
        "timm: config.json has no pretrained_cfg with input_size, mean and std, three numbers each",
    ),
    "crop": (
        {"pretrained_cfg": DATA | {"crop_mode": "border"}},
        "timm prepares images by crop_mode border and interpolation bicubic, which no image processor does",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_computes_something_else_is_refused(what: str) -> None:
    how, message = BAD[what]
    how = dict(how)
    more = how.pop("distilled", False)
    tensors = timm(Path("timm"), **how)
    if more:
        save_file(tensors | {"dist_token": torch.ones(1, 1, HIDDEN)}, "timm/model.safetensors")
    place = Path.cwd() / "timm"
    assert read_refusal("convert", "timm", "-o", "out").replace(str(place), "timm") == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.0.attn.q_norm.weight", "has tensor blocks.0.attn.q_norm.weight (1 such), which a plain vision "),
        ("fc_norm.weight", "has tensor fc_norm.weight (1 such), which a plain vision transformer has no place for"),
    ],
)
def test_tensors_of_something_else_are_refused(name: str, message: str) -> None:
    tensors = timm(Path("timm"))
    save_file(tensors | {name: torch.ones(HIDDEN)}, "timm/model.safetensors")
    assert message in read_refusal("convert", "timm", "-o", "out")
    save_file(tensors | {"pos_embed": torch.ones(10, HIDDEN)}, "timm/model.safetensors")
    assert read_refusal("convert", "timm", "-o", "out").endswith("pos_embed has shape [10, 16], which no ViT's has")
    del tensors["blocks.1.mlp.fc2.bias"]
    save_file(tensors, "timm/model.safetensors")
    assert read_refusal("convert", "timm", "-o", "out").endswith("lacks tensor blocks.1.mlp.fc2.bias")


# ---- masked autoencoders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [ViTMAEForPreTraining, ViTMAEModel])
def test_an_encoder_reads_every_patch(architecture: Any) -> None:
    """A converted encoder reads every patch, as the autoencoder does if it masks none; noise only orders them."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": MLP}
    config = ViTMAEConfig(
        **sizes, image_size=SIDE, patch_size=PATCH, mask_ratio=0.0, decoder_hidden_size=8, decoder_num_attention_heads=2
    )
    model = architecture(config).eval()
    randomise(model, 3)
    model.save_pretrained("mae")
    noise = torch.rand(3, 9, generator=torch.Generator().manual_seed(2))
    encoder = getattr(model, "vit", model).double()
    with torch.no_grad():
        expected = encoder(images().double(), noise=noise).last_hidden_state
    stored = load_file("mae/model.safetensors")
    decoder_tensors = sum(name.startswith("decoder.") for name in stored)
    notes = ["its encoder, which here reads every patch"]
    if decoder_tensors:
        notes.append(f"{decoder_tensors} tensors of the decoder are left out")
    assert ok("convert", "mae", "-o", "out").splitlines()[1:] == notes
    with torch.no_grad():
        ours = AutoModel.from_pretrained("out").double()(images().double()).last_hidden_state
    order = noise.argsort(1)[..., None].expand(-1, -1, HIDDEN)
    torch.testing.assert_close(ours[:, 0], expected[:, 0], rtol=0, atol=1e-10)
    torch.testing.assert_close(ours[:, 1:].gather(1, order), expected[:, 1:], rtol=0, atol=1e-10)
