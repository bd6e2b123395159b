import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.text import fingerprint_windows
from ckpt_prune.measure.statistics import measurement as measure_module
from ckpt_prune.measure.statistics.folder import Statistics, record_effects
from ckpt_prune.measure.statistics.index import StatisticsIndex, add_index
from ckpt_prune.measure.statistics.measurement import add_statistics
from tests.families import BLOCKS, calibrate, job_on, make, prune, recipe, windows
from tests.refusals import refusal

FIELDS = ("sum", "square", "absolute", "active", "gram")
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "llama", "llama-gqa-tied")


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory) -> Statistics:
    return calibrate(model, tmp_path_factory.mktemp("statistics") / "whole", folds=2)


def copy_of(statistics: Statistics, folder: Path) -> Path:
    shutil.copytree(statistics.folder, folder)
    return folder


def assert_equal(a: Statistics, b: Statistics, **tolerance: float) -> None:
    for block in range(BLOCKS):
        a_moments, b_moments = a.read_moments(block), b.read_moments(block)
        assert a_moments.keys() == b_moments.keys()
        for name, folds in a_moments.items():
            for x, y in zip(folds, b_moments[name], strict=True):
                assert x.count == y.count
                for field in FIELDS:
                    torch.testing.assert_close(getattr(x, field), getattr(y, field), **tolerance)


def test_the_index_says_what_was_measured(model, measured):
    index = measured.index
    checkpoint = Checkpoint.open(model)
    assert (index.model, index.tokenizer) == (checkpoint.fingerprint, tokenizer_fingerprint(model))
    assert index.data == [fingerprint_windows(windows())]
    assert (index.samples, index.window, index.tokens, index.folds) == (8, 24, 192, 2)
    assert (index.dtype, index.compute_dtype, index.collect) == ("float32", "float32", ["moments", "gram"])
    assert index.blocks == BLOCKS
    assert index.consumers == {
        "model.layers.{block}.self_attn.o_proj.weight": 16,
        "model.layers.{block}.mlp.down_proj.weight": 22,
    }
    assert sorted(path.name for path in measured.folder.iterdir()) == [*sorted(index.files), "statistics.json"]


def test_what_is_written_is_read(measured):
    """Against the file's own tensors."""
    raw = load_file(measured.folder / "block-00001.safetensors")
    for fold, moments in enumerate(measured.read_moments(1)[DOWN]):
        assert moments.count == raw[f"{DOWN}/{fold}/count"].item() == 4 * 24
        for field in FIELDS[:-1]:
            assert torch.equal(getattr(moments, field), raw[f"{DOWN}/{fold}/{field}"])
        packed = raw[f"{DOWN}/{fold}/gram"]
        assert packed.shape == (22 * 23 // 2,)
        assert torch.equal(moments.gram, moments.gram.T)
        assert torch.equal(moments.gram[torch.triu_indices(22, 22).unbind()], packed)


def test_measuring_twice_gives_the_same_bytes(model, measured, tmp_path):
    again = calibrate(model, tmp_path / "again", folds=2)
    assert again.index.digest == measured.index.digest


def test_added_statistics_are_those_of_both_texts(model, tmp_path):
    first, second = windows(4, seed=1), windows(6, seed=2)
    a, b = calibrate(model, tmp_path / "a", first), calibrate(model, tmp_path / "b", second)
    summed = add_statistics([a, b], tmp_path / "sum")
    assert_equal(summed, calibrate(model, tmp_path / "both", torch.cat([first, second])), rtol=1e-5, atol=1e-4)
    assert (summed.index.samples, summed.index.tokens) == (10, 240)
    assert summed.index.data == [fingerprint_windows(first), fingerprint_windows(second)]
    assert summed.index.digest not in (a.index.digest, b.index.digest)
    assert "hold the same calibration samples: they would count twice" in refusal(
        add_statistics, [summed, a], tmp_path / "twice"
    )
    assert not (tmp_path / "twice").exists()


def test_what_does_not_belong_together_is_not_added(model, measured, tmp_path):
    other = make(tmp_path / "other", "llama-biases")
    cases = {
        "models": calibrate(other, tmp_path / "models", windows(4, seed=1), folds=2),
        "numbers of folds": calibrate(model, tmp_path / "folds", windows(4, seed=1)),
        "kinds of moments": calibrate(model, tmp_path / "kinds", windows(4, seed=1), folds=2, collect=("moments",)),
        "windows": calibrate(model, tmp_path / "windows", windows(4, 12, seed=1), folds=2),
    }
    for name, statistics in cases.items():
        assert refusal(add_statistics, [measured, statistics], tmp_path / "sum") == (
            f"{measured.folder} and {statistics.folder} are of different {name}: only equal ones can be added"
        )


# ---- effects ---------------------------------------------------------------------------------------------------

EFFECTS = {DOWN: [(5, 0.125), (11, 1 / 3)], DOWN.replace(".1.", ".2."): [(5, 0.0), (16, 1e-9)]}
INDEX_OF_OLD = {
    "model": "a" * 64,
    "tokenizer": None,
    "dtype": "float32",
    "data": ["b" * 64],
    "seed": 0,
    "samples": 6,
    "window": 8,
    "tokens": 48,
    "folds": 1,
    "collect": ["moments"],
    "compute_dtype": "float32",
    "blocks": 1,
    "consumers": {"model.layers.{block}.mlp.down_proj.weight": 4},
    "files": {"block-00000.safetensors": "c" * 64},
}


def test_an_index_without_effects_is_as_it_always_was(measured):
    """It is written without them, and its digest is that of before there were any."""
    old = StatisticsIndex.model_validate(INDEX_OF_OLD)
    assert old.effects == {}
    assert old.digest == "e0ca8414ae2560f5970ea9f310b11122a0af1fe133246dec7e1c91104d799508"
    written = json.loads((measured.folder / "statistics.json").read_text())
    assert "effects" not in written
    assert "effects" not in measured.summary()
    assert measured.index.digest == written.pop("digest")
    assert measured.index.digest == hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def test_effects_come_back_and_moments_stay(measured, tmp_path):
    before = Statistics(copy_of(measured, tmp_path / "copy"))
    after = record_effects(before, EFFECTS)
    assert after.folder == before.folder
    assert after.index.effects == Statistics(before.folder).index.effects == EFFECTS
    assert after.index.digest not in (before.index.digest, record_effects(after, {DOWN: EFFECTS[DOWN]}).index.digest)
    assert after.index.model_copy(update={"effects": {}}) == before.index
    assert_equal(after, measured)
    assert after.summary()["effects"][DOWN] == [[5, 0.125], [11, 1 / 3]]
    # What was measured before gives way, to nothing too.
    assert record_effects(after, {}).index.digest == before.index.digest
    assert (before.folder / "statistics.json").read_bytes() == (measured.folder / "statistics.json").read_bytes()
    assert sorted(path.name for path in before.folder.iterdir()) == sorted(p.name for p in measured.folder.iterdir())


@pytest.mark.parametrize(
    ("effects", "why"),
    [
        ([(1, float("nan"))], "Input should be"),
        ([(1, 0.5), (2, float("inf"))], "Input should be a finite number"),
        ([(1, -1e-9)], "Input should be greater than or equal to 0"),
        ([(0, 0.5)], "Input should be greater than or equal to 1"),
        ([(2, 0.5), (1, 0.5)], "units dropped must ascend"),
        ([(2, 0.5), (2, 0.5)], "units dropped must ascend"),
        ([], "units dropped must ascend"),
    ],
)
def test_effects_that_cannot_be(measured, tmp_path, effects, why):
    folder = copy_of(measured, tmp_path / "copy")
    message = refusal(record_effects, Statistics(folder), {DOWN: effects})
    assert message.startswith(f"{folder}: effects")
    assert DOWN in message
    assert why in message
    assert message.endswith(": measure effects again")
    assert (folder / "statistics.json").read_bytes() == (measured.folder / "statistics.json").read_bytes()
    edit_index(folder, effects={DOWN: effects})
    assert "is damaged or of another version" in refusal(Statistics, folder)


def test_effects_of_a_sum():
    """The mean weighted by samples, of what both measured at the same points."""
    a = StatisticsIndex.model_validate(INDEX_OF_OLD | {"effects": {"x": [(1, 0.25), (3, 1.0)], "y": [(2, 1.0)]}})
    b = a.model_copy(update={"samples": 2, "effects": {"x": [(1, 0.75), (3, 0.0)], "y": [(1, 1.0)], "z": [(1, 1.0)]}})
    assert add_index(a, b).effects == {"x": [(1, 0.375), (3, 0.75)]}
    assert add_index(b, a).effects == {"x": [(1, 0.375), (3, 0.75)]}
    assert add_index(a, b.model_copy(update={"effects": {}})).effects == {}
    assert add_index(a.model_copy(update={"effects": {}}), b).effects == {}


# ---- refusals --------------------------------------------------------------------------------------------------


def job(model: Path, folder: Path):
    return job_on(model, recipe("rotation"), Statistics(folder))


def edit_index(folder: Path, **changes) -> None:
    """Change an index as if a former version had written it so, without a digest."""
    path = folder / "statistics.json"
    index = json.loads(path.read_text())
    index.pop("digest", None)
    path.write_text(json.dumps(index | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": "bfloat16"},
            "was measured on another checkpoint, of bfloat16 where this one is float32: measure again",
        ),
        ({"tokenizer": "0" * 64}, "was measured with another tokenizer than this checkpoint's: measure again"),
        ({"tokenizer": None}, "was measured with another tokenizer than this checkpoint's: measure again"),
        ({"model": "0" * 64}, "was measured on another model than this checkpoint: measure again"),
    ],
)
def test_statistics_of_something_else_are_refused(model, measured, tmp_path, changes, message):
    folder = copy_of(measured, tmp_path / "copy")
    edit_index(folder, **changes)
    assert refusal(job, model, folder) == f"{folder} {message}"


def test_files_that_do_not_fit_the_index(measured, tmp_path):
    folder = copy_of(measured, tmp_path / "copy")
    (folder / "block-00002.safetensors").unlink()
    lacks = "lacks block-00002.safetensors, which its index lists: measure again"
    assert refusal(Statistics, folder) == f"{folder} {lacks}"
    for blocks in (1, 10**9):
        edit_index(folder, blocks=blocks)
        assert refusal(Statistics, folder) == (
            f"{folder / 'statistics.json'} does not list the files of each of its {blocks} blocks: measure again"
        )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', b"\xff\xfe"])
def test_a_damaged_index(measured, tmp_path, text):
    folder = copy_of(measured, tmp_path / "copy")
    (folder / "statistics.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert (
        refusal(Statistics, folder) == f"{folder / 'statistics.json'} is damaged or of another version: measure again"
    )
    edited = copy_of(measured, tmp_path / "edited")
    edit_index(edited, extra=1)
    assert "is damaged or of another version" in refusal(Statistics, edited)


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b[:4], lambda b: b""], ids=["cut", "stub", "empty"])
def test_a_damaged_block(measured, tmp_path, damage):
    folder = copy_of(measured, tmp_path / "copy")
    path = folder / "block-00001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(Statistics(folder).read_moments, 1)
    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("): measure again")
    assert Statistics(folder).read_moments(0).keys() == {
        name.replace(".1.", ".0.") for name in measured.read_moments(1)
    }


@pytest.mark.parametrize("missing", ["gram", "sum", "count"])
def test_a_block_without_one_of_its_tensors(model, measured, tmp_path, missing):
    folder = copy_of(measured, tmp_path / "copy")
    path = folder / "block-00001.safetensors"
    tensors = load_file(path)
    del tensors[f"{DOWN}/1/{missing}"]
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"block-00001\.safetensors|needs Grams"):
        prune(job(model, folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", FIELDS)
def test_nan_and_inf_are_named(measured, tmp_path, field, value):
    folder = copy_of(measured, tmp_path / "copy")
    path = folder / "block-00001.safetensors"
    tensors = load_file(path)
    tensors[f"{DOWN}/1/{field}"][3] = value
    save_file(tensors, path)
    assert refusal(Statistics(folder).read_moments, 1) == f"{path}: {DOWN}/1/{field} holds NaN or Inf: measure again"


# ---- measuring -------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_an_interrupted_measurement(model, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_module, "write_block", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert refusal(calibrate, model, tmp_path / "out") == (
        f"{tmp_path} has 1 B free and the output needs 67.1 MB; free space or choose another place"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_overflows_is_named(tmp_path):
    folder = make(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e38
    weights["model.layers.1.mlp.gate_proj.weight"] *= 1e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    message = refusal(calibrate, folder, tmp_path / "out")
    assert message == f"what reaches {DOWN} is not finite: the model overflows in torch.float32"
    assert not (tmp_path / "out").exists()
