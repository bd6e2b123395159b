"""Checkpoints, texts and devices that cannot be used: one line, exit code 2, nothing written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt_prune as cp
from ckpt_prune.demo.run import model_folder
from ckpt_prune.runner.estimate import Estimate
from tests.cli.running import TEXT, edit_statistics, edit_weights, ok, poison, read_refusal, set_config
from tests.evaluation.tiny import tiny_tokenizer

COMMANDS = {
    "calibrate": ["calibrate", *TEXT],
    "plan": ["plan", "--recipe", "magnitude"],
    "prune": ["prune", "--recipe", "magnitude"],
    "prune --text": ["prune", "--recipe", "rcpu", *TEXT],
    "prune --dry-run": ["prune", "--recipe", "magnitude", "--dry-run"],
    "recover": ["recover", "--dense", "dense", *TEXT],
}
every_command = pytest.mark.parametrize(
    "command", [COMMANDS[name] for name in ("calibrate", "prune --dry-run", "recover")], ids=lambda command: command[0]
)
"""One of each kind: they open models in one way, and `refusals.yaml` has the others."""


def refusal(command: list[str], model: str) -> str:
    return read_refusal(command[0], model, *command[1:], "-o", "out")


# ---- files -----------------------------------------------------------------------------------------------------


@every_command
def test_a_shard_shorter_than_its_header_says(place, command):
    path = Path("sharded/model-00002-of-00003.safetensors")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(command, "sharded") == (
        f"{path} is {size - 100} bytes long but its header says {size}: it is truncated; download it again"
    )


@every_command
def test_only_pickles(place, command):
    Path("dense/model.safetensors").unlink()
    torch.save({}, "dense/pytorch_model.bin")
    assert refusal(command, "dense") == (
        "dense has only pickled weights (pytorch_model.bin), which are never unpickled; convert them where they are "
        'trusted: python -c "from transformers import LlamaForCausalLM as M; '
        "M.from_pretrained('dense').save_pretrained('NEW')\", or use https://huggingface.co/spaces/safetensors/convert"
    )


def test_json_in_another_encoding_is_refused_by_what_reads_a_model_beside_another(place):
    """A copy of a tokenizer_config.json that transformers cannot read was verified."""
    path = Path("dense/tokenizer_config.json")
    path.write_bytes(path.read_text().encode("utf-16"))
    assert read_refusal("verify", "pruned", "--against", "dense") == f"{path} is not UTF-8 text: save it as UTF-8"


# ---- tensors against the config --------------------------------------------------------------------------------


@every_command
def test_a_tensor_that_is_missing_or_too_many(place, command):
    edit_weights("dense", lambda tensors: tensors.pop("model.norm.weight"))
    assert refusal(command, "dense") == (
        "dense lacks tensor model.norm.weight (1 missing), which its config.json asks for"
    )
    set_config("sharded", num_hidden_layers=1)
    assert refusal(command, "sharded") == (
        "sharded has tensor model.layers.1.input_layernorm.weight (9 such), which config.json has no place for"
    )


@every_command
def test_weights_of_another_type(place, command):
    edit_weights("dense", lambda tensors: tensors.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}))
    assert refusal(command, "dense") == (
        "model.norm.weight is torch.int8: only bfloat16, float16 and float32 checkpoints can be pruned"
    )


@every_command
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(place, command, value):
    edit_weights("dense", poison("model.layers.1.mlp.up_proj.weight", value))
    assert refusal(command, "dense") == (
        "dense/model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' has 1 NaN or Inf among 384 elements; "
        "download it again or repair it"
    )


# ---- families --------------------------------------------------------------------------------------------------


@every_command
def test_an_unknown_family(place, command):
    """transformers has the class, and no space of it is found."""
    set_config("dense", model_type="mamba", architectures=["MambaForCausalLM"])
    assert refusal(command, "dense").startswith("no space of MambaForCausalLM is proven: ")


# ---- where models are ------------------------------------------------------------------------------------------


WITHOUT_TORCH: list[tuple[list[str], str]] = [
    (["prune", "dense", "--plan", "absent.json", "-o", "out"], "absent.json cannot be read (No such file or "),
    (["prune", "dense", "--set", "spaces.mlp.ratioo=1", "--text", "calib.txt", "-o", "out"], "--set: unknown key "),
    (["plan", "dense", "--recipe", "bad.yaml", "--text", "calib.txt"], "bad.yaml, line 4: unknown key spacez: "),
    (["plan", "dense", "--recipe", "bad.yaml", "--statistics", "stats"], "bad.yaml, line 4: unknown key spacez: "),
    (
        ["prune", "dense", "--recipe", "bad.yaml", "--text", "calib.txt", "-o", "out"],
        "bad.yaml, line 4: unknown key spacez: ",
    ),
    (["prune", "./absent", "-o", "out"], "./absent does not exist; give an existing folder or a Hub id"),
    (["recover", "calib.txt", "--dense", "dense", "-o", "out"], "calib.txt is a file; give the folder that holds"),
    (["plan", "dense", "--recipe", "rcup"], "no recipe 'rcup': did you mean 'rcpu'?"),
    (
        ["prune", "dense", "--ratio", "20", "-o", "out"],
        "--ratio 20: a ratio is from 0 to below 1, or a percentage such as 20%: did you mean 20% or 0.2?",
    ),
    (["prune", "dense", "-o", "pruned"], "{here}/pruned exists; --overwrite replaces it, or give another -o"),
    (["recover", "pruned", "--dense", "dense", "-o", "pruned"], "output pruned overlaps the source pruned"),
    (["prune", "dense", "-o", "dense/out"], "output dense/out overlaps the source dense"),
    (
        ["prune", "dense", "--recipe", "rcpu", "--plan", "p.json", "-o", "out"],
        "a plan has settled its recipe: give --recipe or --plan, not both",
    ),
    (
        ["prune", "dense", "--plan", "p.json", "--set", "ratio=0.2", "-o", "out"],
        (
            "a plan has settled ratio and recipe: --ratio, --target-*, --pattern, --rotate, --set, --for and "
            "--container do not go with it"
        ),
    ),
    (
        ["prune", "dense", "--ratio", "0.2", "--target-params", "70%", "-o", "out"],
        "--target-params and --ratio both say how much goes: give one",
    ),
    (["prune", "dense", "--text", "calib.txt", "--images", ".", "-o", "out"], "give --text or --images, not both"),
    (["prune", "dense", "--labels", "calib.txt", "-o", "out"], "--labels goes with --images"),
    (["plan", "dense", "--target-bytes", "lots"], "--target-bytes lots: "),
    (
        ["calibrate", "dense", "-o", "out"],
        "calibrate needs --text FILE, --images DIR for a vision model, or --audio DIR",
    ),
    (["verify", "absent"], "absent does not exist; give a folder that this tool wrote"),
    (["plan", "experts", "--statistics", "stats"], "config.json of type llama has num_experts, and a llama has no "),
    (["prune", "dense", "--statistics", "absent", "-o", "out"], "absent holds no statistics.json: "),
    (
        ["quantize", "dense", "--format", "int4", "--statistics", "absent", "-o", "out"],
        "absent holds no statistics.json: ",
    ),
    (["export", "dense", "--text", "absent.txt", "-o", "out"], "absent.txt: no such text file"),
    (["export", "dense", "-o", "pruned"], "{here}/pruned exists and is not an exported folder (it has no ckpt_prune_o"),
    (["export", "dense", "--format", "gguf", "-o", "out"], "out: a GGUF file has a name that ends in .gguf"),
    (
        ["quantize", "dense", "--format", "gguf", "--type", "q8_0", *TEXT, "-o", "out"],
        "out: a GGUF file has a name that ends in .gguf",
    ),
    (
        ["quantize", "dense", "--format", "int8", "-o", "pruned"],
        "{here}/pruned exists and is not what `quantize` wrote (it has no ",
    ),
    (
        ["frontier", "dense", "--text", "calib.txt", "--held-out", "held.txt", "-o", "pruned"],
        "{here}/pruned exists and is not a folder that `ckpt-prune frontier` writes (it has no ",
    ),
    *(
        ([*command, "-o", "absent/out"], "the folder {here}/absent does not exist; create it first")
        for command in (
            ["calibrate", "dense", *TEXT],
            ["prune", "dense", *TEXT],
            ["recover", "pruned", "--dense", "dense", *TEXT],
            ["quantize", "dense", "--format", "int8"],
            ["export", "dense"],
        )
    ),
]
"""Arguments, and how the line that refuses them begins."""
WITHOUT_TRANSFORMERS = [
    (["prune", "dense", "--text", "calib.txt", "--device", "gpu", "-o", "out"], "--device gpu: expected auto, cpu, "),
    (["prune", "dense", "--text", "calib.txt", "--statistics", "stats", "-o", "out"], "give --statistics or --text"),
]
"""The same of what needs torch."""
IMPORTS_NOTHING = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from ckpt_prune.cli.main import main
found = []
for arguments in json.loads(sys.argv[1]):
    out, err, code = StringIO(), StringIO(), None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    heavy = sorted({"torch", "transformers", "huggingface_hub"} & sys.modules.keys())
    found.append([code, out.getvalue(), err.getvalue(), heavy])
json.dump(found, sys.stdout)
"""


def test_what_can_be_refused_without_torch_is(place):
    """One Python refuses them all, and after each has imported nothing that takes long."""
    for folder, config in (("experts", {"model_type": "llama", "num_experts": 8}),):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(config))
    Path("held.txt").write_text("what was not seen")
    Path("bad.yaml").write_text("version: 1\nname: bad\nratio: 0.2\nspacez: {}\n")
    cases = [*((*case, []) for case in WITHOUT_TORCH), *((*case, ["torch"]) for case in WITHOUT_TRANSFORMERS)]
    commands = json.dumps([arguments for arguments, *_ in cases])
    done = subprocess.run([sys.executable, "-c", IMPORTS_NOTHING, commands], capture_output=True, text=True, check=True)
    for (arguments, message, expected), (code, out, err, heavy) in zip(cases, json.loads(done.stdout), strict=True):
        assert (code, out, heavy) == (2, "", expected), arguments
        assert err.startswith("Error: " + message.format(here=place)), arguments
        assert err.count("\n") == 1, arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "here/modell"],
        ["recover", "pruned", "--dense", "here/modell", *TEXT, "-o", "out"],
        ["evaluate", "here/modell", "--text", "calib.txt", "--window", "16"],
        ["evaluate", "pruned", "--against", "here/modell", "--text", "calib.txt", "--window", "16"],
        ["benchmark", "dense", "here/modell"],
    ],
)
def test_a_mistyped_folder_is_no_hub_id(place, arguments):
    Path("here/model").mkdir(parents=True)
    assert read_refusal(*arguments) == (
        "the folder here has no modell (did you mean here/model?); give an existing folder"
    )


@every_command
def test_a_hub_id_offline(place, command, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(command, "org/not-in-the-cache") == (
        "org/not-in-the-cache is neither a folder nor in the Hub cache, and HF_HUB_OFFLINE is set; "
        "give a folder, or run `hf download org/not-in-the-cache` while connected"
    )


# ---- devices ---------------------------------------------------------------------------------------------------


@every_command
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_asked_for_and_absent(place, command, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal([*command, "--device", device], "dense") == (
        f"--device {device}: this machine has 0 usable CUDA devices: say --device cpu"
    )


# ---- texts -----------------------------------------------------------------------------------------------------

MEASURING = {
    "calibrate": ["calibrate"],
    "prune": ["prune", "--recipe", "rcpu"],
    "dry run": ["prune", "--recipe", "flap", "--dry-run"],
}
READING = MEASURING | {"recover": ["recover", "--dense", "dense"]}
reading = pytest.mark.parametrize("command", READING.values(), ids=READING)


@reading
def test_a_token_that_the_model_has_no_row_for(place, command):
    """The tokenizer knows more than the embedding has rows for: only a text with such a token is refused."""
    tokenizer = tiny_tokenizer("<s> $A")
    tokenizer.add_tokens([f"<x{number}>" for number in range(10)])
    tokenizer.save_pretrained("dense")
    Path("chat.txt").write_text("<x9> the cat sat " * 160)
    assert refusal([*command, "--text", "chat.txt", "--window", "16"], "dense") == (
        f"token id {tokenizer.convert_tokens_to_ids('<x9>')} is outside the model's vocabulary of 40; the tokenizer "
        "belongs to another model"
    )


def test_an_output_is_not_pruned_into_itself_but_may_be_pruned_again(place):
    ok("prune", "pruned", "--recipe", "rcpu", "--set", "spaces.heads.ratio=0", *TEXT, "-o", "twice")
    assert "FAILED" not in ok("verify", "twice", "--against", "pruned")
    shutil.rmtree("twice")


def test_a_fifo_in_the_place_of_an_input_is_not_waited_for(place):
    for name, command in (
        ("dense/model.safetensors", COMMANDS["prune"]),
        ("dense/config.json", COMMANDS["prune"]),
        ("plan.json", ["prune", "--plan", "plan.json"]),
    ):
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name)
        assert Path(name).parts[0] in refusal(command, "dense")
        Path(name).unlink()


def test_escapes_in_names_do_not_reach_the_terminal(place):
    edit_weights("dense", lambda tensors: tensors.update({"\x1b[2Jx": torch.ones(2)}))
    assert refusal(COMMANDS["prune"], "dense") == (
        r"dense/model.safetensors is not a valid safetensors file (tensor '\x1b[2Jx' has control characters in its "
        "name); download it again"
    )
    edit_statistics("stats", compute_dtype="\x07")
    assert "compute_dtype  \\x07\n" in ok("statistics", "show", "stats")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "Python could get no more"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory. Tried"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_is_one_line(place, monkeypatch, error, words):
    def run_out(*_given: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr("ckpt_prune.runner.prune.run_job", run_out)
    assert refusal(["prune", "--recipe", "magnitude"], "dense") == (
        f"memory ran out ({words}): the same command with --dry-run says how much it needs; fewer --samples need less"
    )


def test_too_little_memory_is_told_before_a_run(monkeypatch):
    monkeypatch.setattr("ckpt_prune.runner.estimate.available_bytes", lambda: 2**30)
    assert Estimate(1.0, 2 * 2**30, 0).warning is None  # the GiB that this process already holds counts
    assert Estimate(1.0, 3 * 2**30, 0).warning.endswith(
        "and only 1.07 GB of memory are free: close other programs, or see by --dry-run what fewer --samples take"
    )


def test_memory_for_grams_is_counted_where_a_recipe_collects_them(monkeypatch):
    """Three of them, of which one is of a half of the samples, or five where folds are held out; in float64."""
    monkeypatch.setattr("ckpt_prune.runner.estimate.resident_bytes", lambda: 0)
    monkeypatch.setattr("ckpt_prune.runner.estimate._activations", lambda *_: 0)  # which are gone when Grams are solved
    flap, ridge, folds = (
        cp.prune(model_folder(), output=None, recipe=name, ratio=0.2, dry_run=True).data()["estimate"]["peak_bytes"]
        for name in ("flap", "ridge", "ridge-folds")
    )
    gram = 8 * json.loads((model_folder() / "config.json").read_text())["intermediate_size"] ** 2
    assert (ridge - flap, folds - flap) == (3 * gram, 5 * gram)
