"""`verify`: all well is exit code 0, a check that fails is 1, what cannot be checked is 2."""

import hashlib
import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.running import TEXT, edit_weights, ok, poison, read_json, read_refusal, run, set_config
from tests.onnx_graphs.exports import make_exports as graphs

WELL = """\
check       result
tensors         ok
finite          ok
load            ok
digests         ok
sparsity         -
side files      ok
kept units      ok

tensors: 21 tensors have the shapes that config.json says
finite: no NaN, no Inf
load: LlamaForCausalLM by stock transformers: no key missing, unexpected or mismatched
digests: 6 file(s) as written
sparsity: no mask recorded; 0.0 % of block weights are zero
side files: tokenizer and generation_config.json load
kept units: producers of 4 pruned spaces hold the dense rows, bit for bit
"""
FILE = "pruned/model.safetensors"
FOREIGN = "asks for remote code that is not this tool's (auto_map in config.json): it is not run"


def failures(*args: str) -> dict[str, str]:
    """Check → what `verify` says of it, for the checks that fail."""
    result = run("verify", *args, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    assert report["passed"] is False
    return {check["name"]: check["detail"] for check in report["checks"] if check["passed"] is False}


def test_all_well(place):
    assert ok("verify", "pruned", "--against", "dense") == WELL


def test_text_of_a_failure(place):
    edit_weights("pruned", lambda tensors: tensors.pop("model.norm.weight"))
    result = run("verify", "pruned")
    assert result.exit_code == 1
    assert result.stdout == (
        "check       result\n"
        "tensors     FAILED\n"
        "finite          ok\n"
        "load        FAILED\n"
        "digests     FAILED\n"
        "sparsity         -\n"
        "side files      ok\n"
        "\n"
        "tensors: pruned lacks tensor model.norm.weight (1 missing), which its config.json asks for\n"
        "finite: no NaN, no Inf\n"
        "load: 1 missing, first model.norm.weight\n"
        "digests: model.safetensors changed since it was written\n"
        "sparsity: no mask recorded; 0.0 % of block weights are zero\n"
        "side files: tokenizer and generation_config.json load\n"
    )


def test_a_flipped_byte(place):
    data = bytearray(Path(FILE).read_bytes())
    data[-1000] ^= 1
    Path(FILE).write_bytes(data)
    assert failures("pruned") == {"digests": "model.safetensors changed since it was written"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_side_file_with_a_byte_order_mark_is_refused(place, name):
    """`sharded` has no digests that would tell."""
    path = Path("sharded", name)
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert read_refusal("verify", "sharded") == (
        f"{path} is UTF-8 with a byte order mark: save it as UTF-8 without one"
    )


def test_a_tokenizer_that_does_not_load(place):
    Path("sharded/tokenizer.json").write_text("{}")
    assert list(failures("sharded")) == ["side files"]


def test_a_tokenizer_with_code_of_its_own_is_not_loaded(place):
    path = Path("sharded/tokenizer_config.json")
    path.write_text(json.dumps(read_json(str(path)) | {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}))
    assert "\nside files: the tokenizer needs code of its own, which is not run\n" in ok("verify", "sharded")


def test_a_width_edited_in_the_config(place):
    set_config("pruned", intermediate_size=13)
    details = failures("pruned")
    assert details["tensors"] == (
        "pruned: model.layers.0.mlp.down_proj.weight has shape [16, 12], config.json says [16, 13]"
    )
    assert details["load"].startswith("6 mismatched, first model.layers.0.mlp.down_proj.weight: ")


def test_a_number_that_is_none(place):
    edit_weights("pruned", poison("lm_head.weight", float("inf")))
    assert failures("pruned")["finite"] == (
        f"{FILE}: tensor 'lm_head.weight' has 1 NaN or Inf among 640 elements; download it again or repair it"
    )


def test_an_unexpected_bias(place):
    """Stock transformers drops it without a word."""
    name = "model.layers.0.mlp.down_proj.bias"
    edit_weights("pruned", lambda tensors: tensors.update({name: torch.zeros(16)}))
    details = failures("pruned")
    assert details["tensors"] == f"pruned has tensor {name} (1 such), which config.json has no place for"
    assert details["load"] == f"1 unexpected, first {name}"


def test_units_the_dense_model_has_not(place):
    report = read_json("pruned/ckpt_prune.json")
    for change in ({"kept": [7]}, {"units": 2**62}):
        report["sites"][0] |= change
        Path("pruned/ckpt_prune.json").write_text(json.dumps(report))
        assert failures("pruned", "--against", "dense") == {
            "kept units": "ckpt_prune.json keeps units of heads in block 0 that the dense model has not"
        }


@pytest.mark.parametrize("auto_map", [5, {"AutoModelForCausalLM": "other.Model"}, {"AutoConfig": "x.Y"}])
def test_code_of_others_is_not_run(place, auto_map):
    set_config("pruned", auto_map=auto_map)
    details = failures("pruned")
    assert details["tensors"] == details["load"] == f"pruned {FOREIGN}"


# ---- zeros -------------------------------------------------------------------------------------------------------


def mask(method: str = "wanda") -> None:
    """Make `masked` of `dense` as a 2:4 recipe would: the first two of every four weights of up_proj go."""
    shutil.copytree("dense", "masked")
    linears = []

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(name for name in tensors if "up_proj" in name):
            weight = tensors[name]
            weight.view(-1, 4)[:, :2] = 0
            rows, columns = weight.shape
            zeros = rows * columns // 2
            linears.append({"block": 0, "weight": name, "rows": rows, "columns": columns, "zeros": zeros, "error": 0.1})

    edit_weights("masked", zero)
    report = read_json("pruned/ckpt_prune.json")
    report |= {
        "files": {},
        "sites": [],
        "linears": linears,
        "mask": {"method": method, "pattern": "2:4", "ratio": 0.5},
        "rotation": None,
    }
    Path("masked/ckpt_prune.json").write_text(json.dumps(report))


def test_a_weight_that_its_mask_dropped_is_back(place):
    mask("sparsegpt")
    edit_weights("masked", poison("model.layers.1.mlp.up_proj.weight", 0.5))
    assert failures("masked", "--against", "dense") == {
        "sparsity": "model.layers.1.mlp.up_proj.weight has 191 zeros, its mask 192; 1 of 2 masked weights do not hold "
        "their mask"
    }


# ---- recovered ---------------------------------------------------------------------------------------------------

RECOVER = ("recover", "pruned", "--dense", "dense", *TEXT, "--epochs", "1", "-o", "out")
OUTSIDE = (
    "7 tensors outside the recovered linear modules are the dense ones, bit for bit; the weights that were recovered "
    "are not compared"
)


def test_recovered(place):
    ok(*RECOVER)
    assert ok("verify", "out", "--against", "dense").splitlines()[-1] == f"kept units: {OUTSIDE}"
    # A linear weight is not compared, but its file is.
    edit_weights("out", poison("model.layers.1.mlp.up_proj.weight", 0.25))
    assert failures("out", "--against", "dense") == {"digests": "model.safetensors changed since it was written"}


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.input_layernorm.weight"])
def test_what_recovery_may_not_change(place, name):
    ok(*RECOVER)
    edit_weights("out", poison(name, 0.25))
    assert failures("out", "--against", "dense") == {
        "digests": "model.safetensors changed since it was written",
        "kept units": f"{name} is not the dense model's, and recovery does not change it",
    }


# ---- graphs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def vision(tmp_path_factory, tmp_path, monkeypatch) -> Path:
    """A working folder with a model and its graph in `vision-onnx`, which was compared with it."""
    model, graph = graphs(tmp_path_factory)("deit-teacher")
    shutil.copytree(model, tmp_path / "vision")
    shutil.copytree(graph, tmp_path / "vision-onnx")
    monkeypatch.chdir(tmp_path)
    ok("validate", "vision-onnx", "--against", "vision")
    return tmp_path


def test_a_byte_of_a_graphs_weight(vision):
    path = Path("vision-onnx/model.onnx")
    weight = next(iter(load_file("vision/model.safetensors").items()))
    data = path.read_bytes()
    at = data.index(weight[1].numpy().tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    tensors = len(read_json("vision-onnx/ckpt_prune_onnx.json")["graphs"][0]["tensors"])
    result = run("verify", "vision-onnx")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "files       FAILED\nchecker         ok\n" in result.stdout
    assert (
        f"\nfiles: model.onnx changed since it was written: 1 of {tensors} weights differ or cannot be read: "
        f"{weight[0]}\n"
    ) in result.stdout
    assert failures("vision-onnx").keys() == {"files", "validation"}


# ---- what cannot be checked ------------------------------------------------------------------------------------


def test_against_another_model(place):
    shutil.copytree("dense", "other")
    edit_weights("other", poison("model.norm.weight", 0.5))
    assert read_refusal("verify", "pruned", "--against", "other") == (
        "pruned was not made from other: its report names dense"
    )


# ---- a bit --------------------------------------------------------------------------------------------------------


def test_a_bit_of_any_file_is_found_and_the_file_named(place):
    """A changed bit is found in every file but the report and the card, which is made of it: those have no digest."""
    job = ("prune", "sharded", "--recipe", "flap-global", "--ratio", "0.5", *TEXT, "-o", "out")
    ok(*job)
    names = {path.name for path in Path("out").iterdir()} - {"ckpt_prune.json", "README.md"}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "modeling_pruned.py"} < names
    assert "modeling_pruned.py is this package's" in ok("verify", "out")
    for name in sorted(names):
        path = Path("out") / name
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        result = run("verify", "out")
        assert result.exit_code in (1, 2), name
        assert name in result.output
        path.write_bytes(content)
    assert run("verify", "out").exit_code == 0


def test_code_that_is_not_this_packages(place):
    """Refused even if the report has its digest, since transformers would run it."""
    ok("prune", "dense", "--recipe", "flap-global", "--ratio", "0.5", *TEXT, "-o", "out")
    code, record = Path("out/modeling_pruned.py"), Path("out/ckpt_prune.json")
    code.write_text(code.read_text() + "# more\n")
    report = read_json(record)
    report["files"][code.name] = hashlib.sha256(code.read_bytes()).hexdigest()
    record.write_text(json.dumps(report))
    result = run("verify", "out")
    assert result.exit_code == 1
    assert "modeling_pruned.py is not this package's, and transformers would run it" in result.stdout
    record.write_text(json.dumps(report | {"ckpt_prune": "0.0.1"}))
    assert "modeling_pruned.py by ckpt_prune 0.0.1" in ok("verify", "out")
    del report["files"]["tokenizer.json"]
    record.write_text(json.dumps(report | {"ckpt_prune": "0.0.1"}))
    assert "a former version took no digest of tokenizer.json" in ok("verify", "out")


# ---- computed again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [("rcpu", "--ratio", "0.5"), ("ridge", "--ratio", "0.25"), ("flap-global", "--ratio", "0.5"), ("wanda-2-4",)],
)
def test_blocks_are_computed_again(place, recipe):
    ok("prune", "dense", "--recipe", *recipe, "--set", "target=dense", "--statistics", "stats", "-o", "out")
    output = ok("verify", "out", "--against", "dense", "--statistics", "stats")
    assert "recomputed: 2 blocks of 2 computed again: bit for bit" in output


def test_weights_that_the_recipe_did_not_make_are_named(place):
    """Kept rows are the dense model's, digests are right: only what compensates is not what it should be."""
    ok("prune", "dense", "--recipe", "ridge", "--set", "target=dense", "--statistics", "stats", "-o", "out")
    name = "model.layers.1.mlp.down_proj.weight"
    edit_weights("out", lambda tensors: tensors[name].mul_(1.002))
    report = read_json("out/ckpt_prune.json")
    report["files"]["model.safetensors"] = hashlib.sha256(Path("out/model.safetensors").read_bytes()).hexdigest()
    Path("out/ckpt_prune.json").write_text(json.dumps(report))
    ok("verify", "out", "--against", "dense")
    result = run("verify", "out", "--against", "dense", "--statistics", "stats")
    assert result.exit_code == 1
    assert f"recomputed: {name} is not what the recipe makes of the source: 0.002 of" in result.stdout


def test_what_cannot_be_computed_again(place):
    ok("prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", *TEXT, "-o", "out")
    assert "recomputed: not computed again: it was measured on text or images" in ok(
        "verify", "out", "--against", "dense", "--statistics", "stats"
    )
    assert read_refusal("verify", "pruned", "--statistics", "stats") == (
        "--statistics needs --against MODEL: blocks are computed again from both"
    )
    ok("prune", "dense", "--recipe", "rcpu", "--set", "target=dense", "--statistics", "stats", "-o", "other")
    ok("calibrate", "dense", *TEXT, "--seed", "1", "-o", "more")
    result = run("verify", "other", "--against", "dense", "--statistics", "more")
    assert result.exit_code == 1
    assert "recomputed: other was made from other statistics than more: give those" in result.stdout
