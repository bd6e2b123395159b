"""`calibrate` and `statistics`."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.measure.statistics.files import INDEX
from ckpt_prune.measure.statistics.folder import Statistics
from tests.cli.running import (
    TEXT,
    edit_statistics,
    edit_weights,
    listing,
    ok,
    poison,
    read_json,
    read_refusal,
    run,
)
from tests.interrupting import interrupt_at

DRY = ("calibrate", "dense", *TEXT, "--folds", "2", "--dry-run", "-o", "s")


def test_a_dry_run_says_what_would_be_measured_and_writes_nothing(place):
    before = listing()
    assert ok(*DRY) == (
        "to be measured: 8 windows of 16 tokens, 2 blocks, 128 tokens in all\n"
        "to be collected: moments+gram+linears+fisher+effects, folds 2\n"
        "s will take 22.7 KB\n"
        "it takes about 1 s, 1.24 GB of memory and 22.7 KB of disk, where nothing else runs on this machine\n"
        "everything checked, nothing written\n"
    )
    report = json.loads(ok(*DRY, "--json"))
    assert listing() == before
    estimate = report.pop("estimate")
    assert estimate["seconds"] > 0
    assert report == {
        "written": False,
        "modality": "text",
        "samples": 8,
        "window": 16,
        "tokens": 128,
        "folds": 2,
        "collect": ["moments", "gram", "linears", "fisher", "effects"],
        "blocks": 2,
        "bytes": estimate["disk_bytes"],
    }
    done = json.loads(ok(*DRY[:-3], "-o", "s", "--json"))
    alike = ("samples", "window", "tokens", "folds", "collect", "blocks")
    assert {key: done[key] for key in alike} == {key: report[key] for key in alike}
    assert report["bytes"] <= done["bytes"] < 1.5 * report["bytes"]


def test_an_existing_folder_stays_unless_told(place):
    assert read_refusal("calibrate", "dense", *TEXT, "-o", "stats") == (
        f"{Path('stats').absolute()} exists; --overwrite replaces it, or give another -o"
    )
    ok("calibrate", "dense", *TEXT, "--seed", "1", "-o", "stats", "--overwrite")
    assert Statistics(Path("stats")).index.seed == 1
    assert read_refusal("calibrate", "dense", *TEXT, "-o", "pruned", "--overwrite") == (
        f"{Path('pruned').absolute()} exists and is not a statistics folder (it has no statistics.json), so it is "
        "never replaced; choose another name"
    )


def test_a_link_is_not_replaced(place):
    Path("link").symlink_to("stats")
    assert read_refusal("calibrate", "dense", *TEXT, "-o", "link", "--overwrite") == (
        f"{Path('link').absolute()} exists and is not a statistics folder (it is a link), so it is never replaced; "
        "choose another name"
    )


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file takes more bytes than this."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("most", [0, 4096])
@pytest.mark.parametrize("command", [["calibrate", "dense", *TEXT], ["statistics", "add", "stats", "other"]])
def test_a_disk_that_fills_up(place, most, command):
    ok("calibrate", "dense", *TEXT, "--seed", "1", "-o", "other")
    before = listing()
    with full_disk(most):
        result = run(*command, "-o", "s")
    assert (result.exit_code, result.stdout) == (2, "")
    message = result.stderr.splitlines()[-1]
    assert message.startswith("Error: cannot write ")
    assert "Traceback" not in result.stderr
    assert message.endswith("; free space or choose another place")
    assert listing() == before


@pytest.mark.parametrize(("rename", "seed"), [(1, 0), (2, 0), (3, 1)])
def test_a_kill_while_statistics_are_replaced_loses_neither(place, rename, seed, monkeypatch):
    """Before the old ones are moved aside, before the new ones are in place, and after: the next command clears up."""
    again = ("calibrate", "dense", *TEXT, "--seed", "1", "-o", "stats", "--overwrite")
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", Staging.release)
        interrupt_at(patch, Path, "rename", rename, Killed())
        with pytest.raises(Killed):
            run(*again)
    seeds = {Statistics(path.parent).index.seed for path in Path().glob(f"*stats*/{INDEX}")}
    assert seeds == {0, 1}
    assert Path("stats").exists() == (rename != 2)
    if rename == 3:
        assert Statistics(Path("stats")).index.seed == seed
    with monkeypatch.context() as patch:
        patch.setattr("ckpt_prune.measure.statistics.measurement.measure_into", stop)
        assert run(*again).exit_code == 130
    assert Statistics(Path("stats")).index.seed == seed
    assert not list(Path().glob(".stats*"))


class Killed(BaseException):
    """Stands for SIGKILL, which no code can catch."""


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# ---- show and add ----------------------------------------------------------------------------------------------


def test_show(place):
    fields = dict(line.split(maxsplit=1) for line in ok("statistics", "show", "stats").splitlines())
    assert fields["collect"] == "moments, gram, linears, fisher, effects"
    assert fields["fisher"] == "8"
    assert fields["predicted"] == fields["effects"] == "of 4 sites (--json has them)"
    assert fields["stream"] == "of 2 blocks (--json has it)"
    assert fields["consumers"] == (
        "model.layers.{block}.self_attn.o_proj.weight (16), model.layers.{block}.mlp.down_proj.weight (24)"
    )
    assert fields["linears"] == (
        "model.layers.{block}.self_attn.q_proj.weight/input (16), model.layers.{block}.mlp.gate_proj.weight/input (16)"
    )
    assert (fields["tokens"], fields["bytes"]) == ("128", "18.0 KB")
    index = Statistics(Path("stats")).index
    assert fields["model"] == f"of the checkpoint it was measured on, sha256 {index.model[:12]}…"
    assert fields["data"] == f"of the samples, text by text, sha256 {index.data[0][:12]}…"


def test_add(place):
    ok("calibrate", "dense", *TEXT, "--seed", "1", "-o", "more")
    assert ok("statistics", "add", "stats", "more", "-o", "sum") == "sum: 16 windows, 256 tokens\n"
    a, b, both = (Statistics(Path(name)).read_moments(1) for name in ("stats", "more", "sum"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert both[name][0].count == 256
    assert (both[name][0].square == a[name][0].square + b[name][0].square).all()
    assert read_refusal("statistics", "add", "stats", "more", "-o", "sum").endswith(
        "sum exists; --overwrite replaces it, or give another -o"
    )
    ok("statistics", "add", "stats", "more", "-o", "sum", "--overwrite")
    # A sum can be used as any other statistics.
    ok("prune", "dense", "--recipe", "rcpu", "--statistics", "sum", "-o", "out")


# ---- statistics that do not belong to the model, or are damaged ------------------------------------------------


def test_statistics_of_a_retokenised_or_edited_model(place):
    edit_weights("dense", poison("model.norm.weight", 0.5))
    assert read_refusal("prune", "dense", "--recipe", "rcpu", "--statistics", "stats", "-o", "out") == (
        "stats was measured on another model than this checkpoint: measure again"
    )
    shutil.rmtree("dense")
    shutil.copytree("sharded", "dense")
    (Path("dense") / "tokenizer_config.json").unlink()
    assert read_refusal("prune", "dense", "--recipe", "rcpu", "--statistics", "stats", "-o", "out") == (
        "stats was measured with another tokenizer than this checkpoint's: measure again"
    )


def test_an_edited_index(place):
    edit_statistics("stats", consumers={})
    assert read_refusal("prune", "dense", "--recipe", "rcpu", "--statistics", "stats", "-o", "out") == (
        "stats/statistics.json does not list this model's blocks and consumers: measure again"
    )


@pytest.mark.parametrize("name", ["{block:>999999999}", "{nope}", "{block.__class__}"])
def test_names_in_an_index_are_no_formats(place, name):
    for folder, data in (("stats", "a"), ("other", "b")):
        if folder == "other":
            shutil.copytree("stats", "other")
        index = read_json(f"{folder}/statistics.json")
        edit_statistics(folder, consumers={**index["consumers"], name: 3}, data=[data])
    assert read_refusal("statistics", "add", "stats", "other", "-o", "sum") == (
        f"stats/block-00000.safetensors is damaged (File does not contain tensor {name}/0/sum): measure again"
    )


@pytest.mark.parametrize(
    ("file", "name", "meant"),
    [
        ("block-00001", "model.layers.1.mlp.down_proj.weight/0/gram", "[300] is meant"),
        ("block-00001", "model.layers.1.mlp.down_proj.weight/0/sum", "[24] is meant"),
        ("block-00001", "model.layers.1.mlp.down_proj.weight/0/count", "[] is meant"),
        ("fisher-00001", "model.layers.1.mlp.down_proj.weight", "['any'] is meant"),
    ],
)
def test_shapes_that_are_not_what_was_measured(place, file, name, meant):
    """Even if the index has the digest of the file."""
    edit_weights("stats", lambda tensors: tensors.update({name: torch.ones(3, 3)}), f"{file}.safetensors")
    files = read_json("stats/statistics.json")["files"]
    edit_statistics("stats", files=files | sha256_files(Path("stats"), [f"{file}.safetensors"]))
    assert read_refusal("plan", "dense", "--recipe", "ridge", "--statistics", "stats", "-o", "plan.json") == (
        f"stats/{file}.safetensors: {name} has shape [3, 3], where {meant}: measure again"
    )


def test_a_block_with_other_numbers(place):
    """Finite and well-formed, but not what was measured."""
    name = "model.layers.1.mlp.down_proj.weight/0/sum"
    edit_weights("stats", lambda tensors: tensors[name].add_(1), "block-00001.safetensors")
    assert read_refusal("prune", "dense", "--recipe", "rcpu", "--statistics", "stats", "-o", "out") == (
        "stats/block-00001.safetensors is not the file that was measured (its digest differs): measure again"
    )


# ---- shards ----------------------------------------------------------------------------------------------------


def test_shards_add_up_to_what_one_machine_measures(place):
    for shard in ("1/3", "2/3", "3/3"):
        ok("calibrate", "dense", *TEXT, "--shard", shard, "-o", f"s{shard[0]}")
    assert [Statistics(Path(f"s{i}")).index.samples for i in (1, 2, 3)] == [2, 3, 3]
    assert ok("statistics", "add", "s2", "s3", "s1", "-o", "sum") == "sum: 8 windows, 128 tokens\n"
    single, added = Statistics(Path("stats")), Statistics(Path("sum"))
    assert (added.index.data, added.index.samples) == (single.index.data, 8)
    for block in range(2):
        for name, (moments,) in single.read_moments(block).items():
            (other,) = added.read_moments(block)[name]
            assert other.count == moments.count
            assert torch.allclose(other.gram, moments.gram, rtol=1e-4, atol=1e-4)


def test_a_shard_is_not_added_twice_nor_what_overlaps_it(place):
    for shard in ("1/2", "2/2", "2/3"):
        ok("calibrate", "dense", *TEXT, "--shard", shard, "--collect", "moments,gram,linears,fisher", "-o", shard[::2])
    half, other, third = "12", "22", "23"
    for twice in ((half, half), (half, other, half), (half, third), (other, third), ("stats", half)):
        assert read_refusal("statistics", "add", *twice, "-o", "sum").endswith(
            "hold the same calibration samples: they would count twice"
        )
    ok("statistics", "add", half, other, "-o", "sum")
    assert read_refusal("statistics", "add", "sum", third, "-o", "more").endswith("they would count twice")
    assert read_refusal("statistics", "add", half, "-o", "more") == (
        "there is nothing to add: name two statistics folders, or more"
    )
