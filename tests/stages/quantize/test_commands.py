"""`quantize`: a checkpoint with weights of few bits that stock transformers loads, and that is its source, rounded."""

import copy
import json
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.stages.quantize import step as quantise
from ckpt_prune.stages.shared import measure_dense
from tests.cli.running import edit_weights, ok, read_json, read_refusal, run
from tests.contract.models import CASES
from tests.evaluation.tiny import random_windows, tiny_llama, tiny_tokenizer
from tests.families import contents
from tests.gguf_files.tiny import save
from tests.hub_server import Hub
from tests.interrupting import stop_before
from tests.once import once, run_folder
from tests.pairs import choose_cases, every
from tests.stages.quantize.test_rounding import bits_of, slow_gptq

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose weights groups of 32 and 64 divide, in two shards, with its tokenizer, licence and some text."""

    def make(here: Path) -> Path:
        with quiet_transformers():
            tiny_llama(hidden_size=64, intermediate_size=128, initializer_range=0.2).save_pretrained(
                here / "dense", max_shard_size="200KB"
            )
        tiny_tokenizer().save_pretrained(here / "dense")
        (here / "dense" / "LICENSE").write_text("mine\n")
        (here / "calib.txt").write_text("the cat sat on a mat and then a dog ran far away " * 20)
        return here

    return once(run_folder(tmp_path_factory) / "to-quantise", make)


@pytest.fixture
def here(model: Path, tmp_path: Path) -> Path:
    for name in ("dense", "calib.txt"):
        (tmp_path / name).symlink_to(model / name)
    return tmp_path


def load_float32(folder: str) -> PreTrainedModel:
    """Load in float32, in which codes times scales are exact."""
    with quiet_transformers():
        causal_model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return causal_model.eval()


def calibration_ids(text: str) -> torch.Tensor:
    """Windows of a text, for a model of any of the tokenizers here."""
    ids = load_tokenizer(Path("dense"))(Path(text).read_text(), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // 16 * 16]).reshape(-1, 16)


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def oracle(folder: str) -> PreTrainedModel:
    """The dense model in float64 with every packed weight read bit by bit in its place."""
    tensors = tensors_of(folder)
    model = copy.deepcopy(load_float32("dense")).double()
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        module = name.removesuffix(".weight_packed")
        rows, columns = tensors[f"{module}.weight_shape"].tolist()
        bits = 32 * tensors[name].shape[1] // columns
        codes = torch.from_numpy(bits_of(tensors[name].numpy(), bits, columns)).double()
        scales = tensors[f"{module}.weight_scale"].double()
        weight = (codes.reshape(rows, scales.shape[1], -1) * scales[..., None]).reshape(rows, columns)
        model.get_submodule(module).weight.data = weight
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("format", "size", "scales"),
    [("int8", None, 1), ("int8", "32", 2), ("int4", None, 1), ("int4", "32", 2), ("int4", "channel", 1)],
)
def test_stock_transformers_computes_what_codes_and_scales_say(here: Path, format, size, scales):
    ok("quantize", "dense", "-o", "out", "--format", format, *(["--group-size", size] if size else []))
    ids = random_windows(2, 12)
    with torch.no_grad():
        ours, theirs = load_float32("out")(ids).logits, oracle("out")(ids).logits
        dense = load_float32("dense")(ids).logits
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    assert 1e-3 < (ours - dense).abs().max() < 5
    tensors = tensors_of("out")
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].shape == (64, scales)
    assert {name.split(".")[-2] for name in tensors if name.endswith("weight_packed")} == LINEARS
    assert torch.equal(tensors["lm_head.weight"], tensors_of("dense")["lm_head.weight"])


def test_what_is_said_and_written(here: Path):
    lines = ok("quantize", "dense", "-o", "out", "--format", "int4").splitlines()
    record = json.loads(Path("out/ckpt_prune_quantised.json").read_text())
    assert (record["format"], record["group_size"], len(record["weights"])) == ("int4", 64, 14)
    assert record["after"] == sum(tensor.nbytes for tensor in tensors_of("out").values())
    assert record["before"] == sum(tensor.nbytes for tensor in tensors_of("dense").values())
    assert lines[0].split() == ["before", "after", "share"]
    assert lines[2] == "14 weights as int4, one scale per group of 64 columns"
    worst = max(record["weights"], key=lambda weight: weight["error"])
    assert lines[3].endswith(f"{worst['error']:.3%} of {worst['weight']}")
    assert 0.001 < worst["error"] < 0.03
    assert lines[4] == "written to out"
    config = json.loads(Path("out/config.json").read_text())
    dense_config = json.loads(Path("dense/config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == dense_config | {"rope_theta": 10000.0}  # transformers 4 reads no rope_parameters
    assert (quantization["quant_method"], quantization["format"], quantization["ignore"]) == (
        "compressed-tensors",
        "pack-quantized",
        ["lm_head"],
    )
    # Shards, tokenizer and licence are the source's.
    shards = {path.name for path in Path("dense").glob("*.safetensors")}
    assert len(shards) > 1
    assert {path.name for path in Path("out").glob("*.safetensors")} == shards
    assert Path("out/LICENSE").read_text() == "mine\n"
    assert {"tokenizer.json", "README.md", "model.safetensors.index.json"} <= {
        path.name for path in Path("out").iterdir()
    }


def test_verify_proves_it(here: Path):
    ok("quantize", "dense", "-o", "out", "--format", "int8")
    assert ok("verify", "out", "--against", "dense").splitlines()[-6:] == [
        "tensors: 14 weights are stored as int8, one scale per row",
        "finite: no NaN, no Inf",
        "load: by stock transformers: no key missing, unexpected or mismatched",
        f"digests: {len(read_json('out/ckpt_prune_quantised.json')['files'])} file(s) as written",
        "side files: tokenizer and generation_config.json load",
        "rounded weights: 14 weights are the source's, rounded to nearest; 7 tensors are its own, bit for bit",
    ]


def test_verify_finds_what_was_changed(here: Path):
    ok("quantize", "dense", "-o", "out", "--format", "int4")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    file = next(f for f in Path("out").glob("*.safetensors") if name in safe_open(f, "pt").keys())  # noqa: SIM118

    def flip(tensors: dict[str, Any]) -> None:
        tensors[name][0, 0] ^= 1

    edit_weights("out", flip, file.name)
    done = run("verify", "out", "--against", "dense")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-3::2] == [
        f"digests: {file.name} changed since it was written",
        "rounded weights: model.layers.0.mlp.up_proj.weight is not the source's, rounded to nearest",
    ]
    edit_weights("out", lambda tensors: tensors.pop(name), file.name)
    done = run("verify", "out")
    assert done.exit_code == 1
    assert "tensors: model.layers.0.mlp.up_proj lacks weight_packed or weight_scale" in done.stdout
    assert "load: " in done.stdout
    assert name in next(line for line in done.stdout.splitlines() if line.startswith("load: "))


@pytest.mark.parametrize(("size", "code"), [(10**6, 1), (0, 2)])
def test_verify_of_groups_that_make_up_no_row(here: Path, size: int, code: int):
    """This once ended in a traceback, as did a weight without columns."""
    ok("quantize", "dense", "--format", "int8", "-o", "out")
    path = Path("out/ckpt_prune_quantised.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"group_size": size}))
    result = run("verify", "out", "--against", "dense")
    assert result.exit_code == code, result.output


def test_it_is_evaluated_and_pushed_like_any_other(here: Path, hub: Hub):
    Path("out").mkdir()
    Path("out").rmdir()
    ok("quantize", "dense", "-o", "out", "--format", "int8")
    output = ok("evaluate", "out", "--against", "dense", "--text", "calib.txt", "--window", "16", "--json")
    assert 0 < json.loads(output)["kl"] < 0.01
    Path("found.json").write_text(output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # the Hub's client of this version, as it uploads
        ok("push", "out", "team/q8", "--base-model", "org/dense", "--evaluation", "words=found.json")
    card = hub.repos["team/q8"].files["README.md"].decode()
    assert "base_model: org/dense\nbase_model_relation: quantized\n" in card
    assert "model-index:" in card
    assert {"ckpt_prune_quantised.json", "LICENSE"} <= set(hub.repos["team/q8"].files)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt2", "small is a gpt2, whose Conv1D modules transformers does not quantise"),
        ("mixtral", "small: experts are no linear modules in transformers, so they are not quantised"),
        (
            "vit",
            "small: transformers holds vit.encoder.layer.0.attention.attention.key.weight under another name, or not "
            "as a linear module, and would not find it quantised",
        ),
        (
            "modernbert",
            "small: transformers' ModernBertForMaskedLM cannot be loaded with packed weights ('Linear' object has no "
            "attribute 'weight')",
        ),
    ],
)
def test_what_transformers_cannot_load_is_refused(here: Path, model_type: str, message: str):
    next(case for case in CASES if case.model_type == model_type).write(here / "small")
    assert read_refusal("quantize", "small", "-o", "out", "--format", "int8") == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dense", "--group-size", "7"), "--group-size 7: kernels take groups of 128, 64, 32, or whole rows (channel)"),
        (("dense", "--group-size", "0"), "--group-size 0: kernels take groups of 128, 64, 32, or whole rows (channel)"),
        (
            ("dense", "--group-size", "128"),
            "--group-size 128 does not divide the 64 columns of model.layers.0.mlp.gate_proj.weight: all are divided "
            "by 64, 32 or channel",
        ),
        (
            ("odd",),
            "model.layers.0.mlp.down_proj.weight has 22 columns, which no group of 128, 64, 32 divides: say "
            "--group-size channel, or prune in multiples (--set spaces.mlp.multiple_of=32)",
        ),
        (("none/where",), "none/where is neither a folder nor in the Hub cache, and HF_HUB_OFFLINE is set; "),
        (("twice",), "twice is quantised by compressed-tensors (quantization_config in config.json); "),
        (
            ("dense", "-o", "there"),
            "exists and is not what `quantize` wrote (it has no ckpt_prune_quantised.json), so it is never replaced; ",
        ),
    ],
)
def test_bad_input_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if words == ("odd",):
        tiny_llama(hidden_size=32, intermediate_size=22).save_pretrained("odd")
    if words == ("twice",):
        ok("quantize", "dense", "-o", "twice", "--format", "int8")
    Path("there").mkdir()
    place = () if "-o" in words else ("-o", "out")
    given = ("--overwrite",) if "-o" in words else ()
    error = read_refusal("quantize", *words, *place, *given, "--format", "int4")
    assert message in error


def test_without_the_library_it_says_which_extra(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    assert read_refusal("quantize", "dense", "-o", "out", "--format", "int8") == (
        'compressed-tensors is not installed: pip install ".[quantize]" in the checkout of ckpt-prune'
    )


def test_code_of_its_own_is_refused(place: Path):
    ok(
        "prune",
        "dense",
        "--recipe",
        "rcpu",
        "--ratio",
        "0.5",
        "--statistics",
        "stats",
        "--container",
        "remote",
        "-o",
        "own",
    )
    assert read_refusal("quantize", "own", "-o", "out", "--format", "int8") == (
        "own needs code of its own, which runtimes of quantised weights do not run: prune into a stock class (widths: "
        "uniform and container: auto, as recipe best-uniform)"
    )


TEXT = ("--text", "calib.txt", "--window", "16")
CALIBRATE = ("calibrate", "dense", *TEXT, "--collect", "moments,gram,linears", "-o", "stats")


@pytest.mark.parametrize("measured", [TEXT, ("--statistics", "stats")])
def test_by_gptq_it_rounds_so_that_outputs_stay(here: Path, measured: tuple[str, ...]):
    ok(*CALIBRATE)
    ok("quantize", "dense", "-o", "plain", "--format", "int4")
    ok("quantize", "dense", "-o", "out", "--format", "int4", *measured)
    ids = calibration_ids("calib.txt")
    with torch.no_grad():
        dense, plain, gptq = (load_float32(name)(ids).logits for name in ("dense", "plain", "out"))
    assert (gptq - dense).square().mean() < 0.6 * (plain - dense).square().mean()
    assert ok("verify", "out", "--against", "dense").splitlines()[-1] == (
        "rounded weights: 14 weights are the source's, as far off as GPTQ left them; 7 tensors are its own, bit for bit"
    )
    record = json.loads(Path("out/ckpt_prune_quantised.json").read_text())
    assert record["rounding"] == "gptq"
    assert bool(record["statistics"]) == ("stats" in measured)
    assert record["samples"] == (None if "stats" in measured else len(ids))
    assert "rounded by GPTQ" in Path("out/README.md").read_text()


def test_every_weight_is_rounded_by_what_reaches_it_in_the_rounded_model(here: Path):
    """The inputs of each linear module of the output are those that its weight was rounded by."""
    ok("quantize", "dense", "-o", "out", "--format", "int4", *TEXT)
    ids, dense, rounded, tensors = (
        calibration_ids("calib.txt"),
        load_float32("dense"),
        load_float32("out"),
        tensors_of("out"),
    )
    grams: dict[str, np.ndarray] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def see(_module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            tokens = given[0].double().flatten(0, 1).numpy()
            grams[name] = tokens.T @ tokens

        module.register_forward_pre_hook(see)

    names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    for name in names:
        watch(name, rounded.get_submodule(name))
    with torch.no_grad():
        rounded(ids)
    for name in names:
        weight = dense.get_submodule(name).weight.detach().double()
        scales = tensors[f"{name}.weight_scale"].double().repeat_interleave(64, dim=1).numpy()
        codes = bits_of(tensors[f"{name}.weight_packed"].numpy(), 4, weight.shape[1])
        assert (codes == slow_gptq(weight.numpy(), grams[name], scales, 4)).mean() > 0.999, name


RIDGE = """version: 1
name: ridge-int4
ratio: 0.5
spaces:
  mlp: {score: rcpu, compensation: {method: ridge, lambda: 0.01}}
quantize: {format: int4}
"""


@pytest.mark.parametrize(
    "target", choose_cases(["dense", "sequential", "drift"], lambda target: target == "sequential")
)
def test_one_recipe_prunes_and_rounds_behind_the_pruned_blocks(here: Path, target: str):
    """The same bytes as quantising the pruned model, if what is pruned depends on nothing that is rounded."""
    Path("both.yaml").write_text(f"{RIDGE}target: {target}\n")
    words = ("prune", "dense", *TEXT, "--recipe", "both.yaml")
    ok(*words, "-o", "out")
    report, config = read_json("out/ckpt_prune.json"), read_json("out/config.json")
    assert report["quantize"]["group_size"] == 64
    assert report["after"]["bytes"] == sum(tensor.nbytes for tensor in tensors_of("out").values())
    assert config["intermediate_size"] == 64
    assert [check["passed"] for check in json.loads(ok("verify", "out", "--against", "dense", "--json"))["checks"]] == [
        *[True] * 5,
        None,
    ]
    ids = calibration_ids("calib.txt")
    with torch.no_grad():
        dense, rounded = load_float32("dense")(ids).logits, load_float32("out")(ids).logits
        assert (rounded - dense).square().mean() < 0.5 * dense.square().mean()
    if target == "dense":
        ok(*words, "--set", "quantize=null", "-o", "pruned")
        ok("quantize", "pruned", *TEXT, "--format", "int4", "-o", "after")
        after = tensors_of("after")
        assert all(torch.equal(tensor, after[name]) for name, tensor in tensors_of("out").items())
    card = Path("out/README.md").read_text()
    assert "vllm serve" in card
    assert "mlx_lm" not in card


MIXED = """version: 1
name: mixed
ratio: 0.5
spaces: {mlp: {score: rcpu, compensation: {method: ridge, lambda: 0.01}}}
quantize: {format: int4, types: {down_proj: "int8:channel", "layers.0.self_attn.[qkv]_": dense, o_proj: "int4:32"}}
"""


def test_a_recipe_says_how_each_weight_is_stored(here: Path):
    Path("mixed.yaml").write_text(MIXED)
    ok("prune", "dense", *TEXT, "--recipe", "mixed.yaml", "-o", "out")
    tensors, report = tensors_of("out"), read_json("out/ckpt_prune.json")["quantize"]
    layer = "model.layers.{}.self_attn.{}.weight{}"
    assert layer.format(0, "k_proj", "") in tensors
    assert layer.format(1, "k_proj", "_packed") in tensors
    assert tensors[layer.format(0, "o_proj", "_scale")].shape[1] == 2
    stored = {weight["weight"]: weight.get("stored") for weight in report["weights"]}
    assert stored["model.layers.1.mlp.down_proj.weight"] == "int8:channel"
    assert len(stored) == 11
    assert (report["format"], report["group_size"]) == ("int4", 64)
    assert "tensors: 11 weights are stored as 7 in int4:64, 2 in int8:channel, 2 in int4:32" in ok("verify", "out")
    data = ("--text", "calib.txt", "--window", "16", "--json")
    assert 0 < json.loads(ok("evaluate", "out", "--against", "dense", *data))["kl"] < 1


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("{q_proj: dense}", "vLLM joins weights that read one input, so store them alike (model.layers.0.self_attn.q_"),
        ('{o_proj: "int4:128"}', "quantize.types: int4:128 does not divide the 64 columns of model.layers.0.self_attn"),
        ("{o_proj: int5}", "int5 is no way to store a weight: say int4:32|64|128|channel, int8:32|64|128|channel or d"),
        ('{"(": dense}', "( is no regular expression (missing ), unterminated subpattern at position 0)"),
    ],
)
def test_ways_that_do_not_fit_are_refused(here: Path, types: str, message: str):
    Path("mixed.yaml").write_text(f"{RIDGE[: RIDGE.index('quantize')]}quantize: {{format: int4, types: {types}}}\n")
    refused = run("prune", "dense", *TEXT, "--recipe", "mixed.yaml", "-o", "out")
    assert refused.exit_code == 2
    assert message in refused.stderr.splitlines()[-1]


def test_rounding_behind_zeros_of_magnitude_measures_the_dense_model_never(here: Path, monkeypatch: pytest.MonkeyPatch):
    Path("both.yaml").write_text(
        "version: 1\nname: both\nratio: 0.5\nmask: {method: magnitude}\nquantize: {format: int4}\n"
    )
    monkeypatch.setattr(measure_dense, "measure_first", None)
    ok("prune", "dense", *TEXT, "--recipe", "both.yaml", "-o", "out")
    assert read_json("out/ckpt_prune.json")["quantize"]["rounding"] == "gptq"


def test_what_is_made_of_a_model_that_nobody_described_names_it(here: Path):
    save(Path("helium"), "helium", head_dim=8)
    ok("quantize", "helium", "--format", "int8", "-o", "rounded")
    ok("export", "helium", "--no-validate", "-o", "graph")
    for made in ("rounded", "graph"):
        assert "FAILED" not in ok("verify", made, "--against", "helium")


def test_own_code_is_not_advised_where_weights_are_rounded(here: Path):
    save(Path("gemma"), "gemma3_text", head_dim=16)
    Path("both.yaml").write_text(RIDGE.replace("method: ridge, lambda: 0.01", "method: affine") + "container: any\n")
    refused = run("prune", "gemma", *TEXT, "--recipe", "both.yaml", "-o", "out")
    assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (
        2,
        "Error: no stock class fits: gemma3_text has no slot for a bias on mlp.down_proj. Take a compensation "
        "without a bias, as recipe ridge has",
    )


@pytest.mark.parametrize(("entry", "target"), every(6, product(["block 1", "block 0", "rest"], ["drift", "dense"])))
def test_a_killed_prune_that_rounds_is_resumed_to_the_same_bytes(
    here: Path, monkeypatch: pytest.MonkeyPatch, target: str, entry: str
):
    Path("both.yaml").write_text(f"{RIDGE}target: {target}\n")
    words = ("prune", "dense", *TEXT, "--recipe", "both.yaml", "-o")
    ok(*words, "whole")
    with monkeypatch.context() as patch:
        stop_before(patch, entry)
        assert run(*words, "out").exit_code == 130
    ok(*words, "out", "--resume")
    uninterrupted, resumed = tensors_of("whole"), tensors_of("out")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in uninterrupted.items())
    assert read_json("whole/config.json") == read_json("out/config.json")


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (RIDGE, ("--statistics", "stats"), "ridge-int4 rounds weights by what reaches them behind the pruned blocks"),
        (f"{RIDGE}recovery: {{epochs: 1}}\n", TEXT, "recovery and quantize do not go in one recipe: prune first"),
        (
            f"{RIDGE}runs_on: [mlx]\n",
            TEXT,
            "mlx does not take outputs with linear",
        ),
        (f"{RIDGE}widths: per_layer\ncontainer: remote\n", TEXT, "runtimes of quantised weights run no code"),
    ],
)
def test_recipes_that_cannot_round_are_refused(here: Path, recipe: str, words: tuple[str, ...], message: str):
    ok(*CALIBRATE)
    Path("both.yaml").write_text(recipe)
    done = run("prune", "dense", *words, "--recipe", "both.yaml", "-o", "out")
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
    assert not Path("out").exists()


def test_statistics_take_the_place_of_text(here: Path):
    ok(*CALIBRATE)
    assert read_refusal("quantize", "dense", "-o", "out", "--format", "int4", "--statistics", "stats", *TEXT) == (
        "--statistics takes the place of --text: give one of them"
    )


def test_statistics_of_another_kind_or_model_are_refused(here: Path):
    ok("calibrate", "dense", "--text", "calib.txt", "--window", "16", "--collect", "moments,gram", "-o", "stats")
    assert read_refusal("quantize", "dense", "-o", "out", "--format", "int4", "--statistics", "stats") == (
        "stats has no Grams of the inputs of all linear weights: calibrate with --collect moments,gram,linears"
    )
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "other")
    message = read_refusal("quantize", "other", "-o", "out", "--format", "int4", "--statistics", "stats")
    assert "stats" in message
    assert "model" in message


def test_a_tokenizer_that_changes_meanwhile_is_an_error(here, monkeypatch) -> None:
    """Once the output had the new tokenizer, and its weights were rounded by tokens of the old one."""
    shutil.copytree(here / "dense", here / "own")
    name = here / "own" / "tokenizer_config.json"
    usual = quantise.pack_weight

    def change_and_pack(*args: Any) -> Any:
        name.write_text(name.read_text() + "\n")
        return usual(*args)

    monkeypatch.chdir(here)
    monkeypatch.setattr(quantise, "pack_weight", change_and_pack)
    result = run("quantize", "own", "--format", "int8", "-o", "out")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "Error: own/tokenizer_config.json changed since it was opened; run again"
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("entry", "measured"), every(4, product(["block 1", "rest"], [TEXT, ("--statistics", "stats")]))
)
def test_a_killed_run_is_resumed_to_the_same_bytes(
    here: Path, monkeypatch: pytest.MonkeyPatch, entry: str, measured: tuple[str, ...]
):
    ok(*CALIBRATE)
    words = ("quantize", "dense", "--format", "int4", *measured, "-o")
    ok(*words, "whole")
    with monkeypatch.context() as patch:
        stop_before(patch, entry)
        stopped = run(*words, "out")
    assert stopped.exit_code == 130
    assert "OUT.partial keeps what is done".replace("OUT", "out") in stopped.stderr
    rounded: list[str] = []
    usual = quantise.pack_weight
    monkeypatch.setattr(quantise, "pack_weight", lambda *given: rounded.append(given[0]) or usual(*given))
    assert "of 2 blocks quantised" in run(*words, "out", "--resume").stderr
    assert len(rounded) == (7 if entry == "block 1" else 0)
    assert contents(Path("out")) == contents(Path("whole"))
    assert not Path("out.partial").exists()
    assert "out is finished: nothing is left to do" in run(*words, "out", "--resume").stderr
