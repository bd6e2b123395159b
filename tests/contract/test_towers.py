"""Towers that are found, calibrated on the images of conversations, against the whole model pruned by hand."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

import ckpt_prune
from ckpt_prune.measure.samples.image_files import ImageFiles
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.image_text import ImageTextWindows, Reader, pack_windows
from ckpt_prune.measure.samples.tower_images import TowerImages
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.verification.verify import verify
from tests.encoders import DEFAULTS, STRENGTH
from tests.images import write_image
from tests.pairs import choose_cases
from tests.refusals import refusal
from tests.talks import NEEDS, READERS, write_rows, write_talker
from tools.families import write_tiny

from .test_parts import COMPUTED, InComposite, PartCase, composite_of
from .whole import assert_same_outputs, outputs

TOKENS = 250
SIZES = {"gemma4": ((14, 20), (20, 14), (28, 40))}
"""Of images, if not 16 by 16 and twice as long in either way: Gemma 4's fill all tokens, so that none is padding."""
ALONE = ("gemma3", "llava")
"""Their towers read images of one size, and are run as models of their own."""


class OneWindow:
    """A window that holds all images."""

    tokens, fingerprint = TOKENS, "one"

    def __init__(self, windows: ImageTextWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return 1

    def batch(self, _rows: slice) -> dict[str, Tensor]:
        return self.windows.whole_inputs(0)


@pytest.mark.parametrize("model_type", ["kimi_k25", "mistral_large4"])
def test_blocks_have_the_weights_that_transformers_loads(model_type: str, tmp_path: Path) -> None:
    """Files hold rotary pairs of these in another order, which the tower's own type tells, or the whole's alone."""
    model = open_model(str(write_tiny(model_type, None, tmp_path / "source")), Opening(part="vision"))
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "source")
    (tower,) = composite_of(whole.config).part("vision").modules
    loaded = whole.get_submodule(f"{tower}.{model.family.layers}.1")
    built = factory.build_block(1, model.read_block(1))
    assert_close(dict(built.named_parameters()), dict(loaded.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(
    "model_type", choose_cases([each for each in READERS if each not in ALONE], ("qwen3_vl", "llava_next").__contains__)
)
def test_equals_the_whole_pruned_by_hand(model_type: str, tmp_path: Path) -> None:
    """Images of several sizes, in tiles or patches: the tower is handed what its whole makes of each."""
    if find_spec(NEEDS.get(model_type, "torch")) is None:
        pytest.skip(f"the processor of {model_type} imports {NEEDS[model_type]}, which is not installed")
    folder, rows = tmp_path / model_type, write_rows(tmp_path)
    stock = write_talker(folder, model_type)
    for number, image in enumerate(sorted((tmp_path / "images").iterdir())):
        write_image(image, number, SIZES.get(model_type, ((16, 16), (32, 16), (16, 32)))[number % 3])
    heads = (("heads", 0.5),) * (model_type == "gemma4")
    case = PartCase(model_type, "vision", (*heads, ("mlp", 0.5)))
    case.__dict__["model"] = stock
    model = open_model(str(folder), Opening(part="vision"))
    assert model.checkpoint.within is not None
    reader = Reader(model.checkpoint.within.whole, trust=False)
    windows = pack_windows(reader, rows, samples=1, window=TOKENS, seed=0, config=stock.config.get_text_config())
    paths = tuple(path for written in windows.rows[0] for path in written.images)
    assert len(paths) > 1
    recipe = tmp_path / "recipe.yaml"
    fit = {"ratio": 0.5, "compensation": {"method": "ridge", "lambda": STRENGTH}}
    spaces = {space: DEFAULTS[space] | fit for space, _ in case.ratios}
    recipe.write_text(json.dumps({"version": 1, "name": "test", "target": "dense", "spaces": spaces}))
    (tmp_path / "seen").mkdir()
    for number, path in enumerate(paths):
        (tmp_path / "seen" / f"{number:03}.png").write_bytes(path.read_bytes())
    data = {"images": tmp_path / "seen", "evaluate_samples": 0}
    ckpt_prune.prune(folder, part="vision", recipe=recipe, output=tmp_path / "out", **data)
    composite = InComposite(case, model)
    composite.model = composite.whole
    (tower,) = composite_of(stock.config).part("vision").modules
    composite.path = lambda *place: f"{tower}.{InComposite.path(composite, *place)}"  # type: ignore[method-assign]
    composite.prune(OneWindow(windows), dict.fromkeys(dict(case.ratios), "ridge"))
    assert_same_outputs(
        outputs(ckpt_prune.load(tmp_path / "out"), OneWindow(windows)),
        outputs(composite.whole, OneWindow(windows)),
        COMPUTED,
    )
    checks = {check.name: check.passed for check in verify(tmp_path / "out", folder)}
    assert all(passed for name, passed in checks.items() if name != "sparsity (vision)"), checks


class Patches(OneWindow):
    """Patches of all images, as a tower is called with them, which it merges behind its blocks."""

    def __init__(self, images: TowerImages) -> None:
        batches = [images.batch(slice(row, row + 1)) for row in range(len(images))]
        self.inputs = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def batch(self, _rows: slice) -> dict[str, Tensor]:
        return self.inputs


def test_what_merges_patches_behind_the_blocks_equals_that_pruned_by_hand(tmp_path: Path) -> None:
    folder, images = write_tiny("glm4v", None, tmp_path / "glm4v"), tmp_path / "images"
    settings = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    stated = {"image_processor_type": "Glm4vImageProcessor", "temporal_patch_size": 2, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    images.mkdir()
    for number, size in enumerate([(32, 32), (64, 32), (32, 64)]):
        write_image(images / f"{number}.png", number, size)
    case = PartCase("glm4v", "vision", (("pooling", 0.5),))
    case.__dict__["model"] = AutoModelForImageTextToText.from_pretrained(folder)
    model = open_model(str(folder), Opening(part="vision"))
    files = ImageFiles(tuple(sorted(images.iterdir())))
    data: Any = Patches(TowerImages(files, load_processor(folder), model))
    space = DEFAULTS["pooling"] | {"ratio": 0.5, "compensation": {"method": "ridge", "lambda": STRENGTH}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"version": 1, "name": "test", "target": "dense", "spaces": {"pooling": space}}))
    ckpt_prune.prune(folder, part="vision", recipe=recipe, output=tmp_path / "out", images=images, evaluate_samples=0)
    composite = InComposite(case, model)
    composite.prune(data, {"pooling": "ridge"})
    loaded = ckpt_prune.load(tmp_path / "out").get_submodule("model.visual")
    made = outputs(loaded, data)
    assert "pooler_output" in made
    assert_same_outputs(made, outputs(composite.model, data), COMPUTED)
    assert loaded.merger.down_proj.in_features == 24
    assert all(each.passed for each in verify(tmp_path / "out", folder) if each.name != "sparsity (vision)")
    masked = {"recipe": "wanda", "part": "vision", "output": tmp_path / "masked", "images": images}
    assert refusal(ckpt_prune.prune, folder, **masked) == (
        "no linear module in the blocks of glm4v_vision can be masked: pooling alone can be pruned, as "
        "recipe ridge does"
    )
    space = ckpt_prune.inspect(folder, part="vision").spaces["pooling"]
    assert space.containers == {"weights": "glm4v_vision", "weights and bias": "none"}
