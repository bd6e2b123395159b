"""DC-ViT: how much each block keeps, which blocks, the training, and what the output is."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.model.model import Model
from ckpt_prune.stages.bare.preview import best_columns, share_out
from tests.cli.running import edit_weights, ok, read_json, run
from tests.images import write_csv, write_images, write_vit
from tests.oracles.bare import features, replaced_blocks, train, without

NAMES = [f"{i:02}.png" for i in range(12)]
JOB = ("prune", "vit", "--recipe", "dc-vit", "--images", "images", "--samples", "10", "--evaluate-samples", "0")
SHORT = "bare={epochs: 2, trial_epochs: 1, warm_up: 1, batch: 4, lr: 0.001}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a vision transformer of four blocks and images."""
    with quiet_transformers():
        write_vit(tmp_path / "vit", num_hidden_layers=4)
    write_images(tmp_path / "images", NAMES)
    write_csv(tmp_path / "labels.csv", "file,label", *(f"images/{name},{i % 6}" for i, name in enumerate(NAMES)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("saved", [1, 500, 999, 1000, 1001, 2700, 2999, 3000, 5800])
@pytest.mark.parametrize(("attention", "column", "columns"), [(400, 10, 60), (400, 7, 85), (10, 30, 33)])
def test_blocks_and_shares(saved: int, attention: int, column: int, columns: int) -> None:
    kept = share_out(saved, attention, column, columns)
    blocks, share = replaced_blocks(*map(Fraction, (saved, attention, column * columns)))
    if share * columns < 1:  # nothing of the MLPs would stay
        assert len(kept) == blocks + 1
        share = min(Fraction(1), 1 - Fraction(saved - len(kept) * attention, len(kept) * column * columns))
    else:
        assert len(kept) == blocks
    assert max(kept) - min(kept) <= 1
    assert min(kept) >= 1
    assert len(kept) * share * columns - 1 < sum(kept) <= len(kept) * share * columns
    spare = len(kept) * attention + column * (columns * len(kept) - sum(kept)) - saved
    assert 0 <= spare < column or sum(kept) == len(kept) * columns


def test_a_short_run_from_the_command_line(here: Path) -> None:
    output = ok(*JOB, "--ratio", "0.3", "--set", SHORT, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    bare = report["bare"]
    wanted, saved = bare["flops"]
    assert saved == report["before"]["flops"] - report["after"]["flops"]
    one_column = 2 * 5 * 2 * 16  # two products of 16 with 5 tokens
    assert 0 <= saved - wanted < one_column
    assert wanted == round(0.3 * report["before"]["flops"])
    order = [each["block"] for each in bare["replaced"]]
    assert order == sorted(range(4), key=lambda block: bare["tried"][block])[: len(order)]
    for each in bare["replaced"]:
        assert each["error_after"] <= each["error_before"]
    assert f"{len(order)} of 4 blocks lose their attention and keep " in output
    assert "Blocks without attention" in output
    verified = ok("verify", "out", "--against", "vit").splitlines()[-1]
    assert verified.startswith(f"kept units: {len(order)} blocks have no attention; ")
    ok("export", "out", "-o", "graph", "--images", "images")
    ok("evaluate", "out", "--against", "vit", "--images", "images", "--labels", "labels.csv")
    edit_weights("out", lambda tensors: tensors["classifier.bias"].add_(1))
    assert run("verify", "out", "--against", "vit").exit_code == 1


def test_training_is_that_of_a_plain_loop(here: Path) -> None:
    steps, lr, decay = 3, 1e-3, 1e-2
    settings = f"bare={{blocks: [1], epochs: {steps}, warm_up: 0, lr: {lr}, weight_decay: {decay}, held_out: 0}}"
    ok(*JOB, "--ratio", "0.1", "--set", settings, "-o", "out")
    (each,) = read_json("out/ckpt_prune.json")["bare"]["replaced"]
    dense, model = ckpt_prune.load("vit"), Model.open("vit")
    assert each["columns"] == best_columns(model, model.read_block(1), 1, len(each["columns"]))
    student: Any = without(dense, 1, each["columns"])
    images = calibration_images()
    with torch.no_grad():
        targets = features(dense, images)
        before = float(((features(student, images) - targets) ** 2)[[5]].mean())
    assert each["error_before"] == pytest.approx(before, rel=1e-4)
    train(student, 3, images, targets, lr=lr, decay=decay, steps=steps)
    with torch.no_grad():
        after = float(((features(student, images) - targets) ** 2)[[5]].mean())
        found = features(ckpt_prune.load("out"), images)
        assert torch.allclose(found, features(student, images), atol=1e-3)
    assert each["error_after"] == pytest.approx(after, rel=1e-2)


def calibration_images() -> torch.Tensor:
    from ckpt_prune.measure.samples.choose import choose_samples
    from ckpt_prune.options.commands import PruneOptions

    options = PruneOptions.model_validate({"model": "vit", "output": "o", "images": Path("images"), "samples": 10})
    samples = choose_samples(Model.open("vit"), options, trust=False, say=print)
    return samples.batch(slice(None))["pixel_values"]
