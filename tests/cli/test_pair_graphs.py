"""Encoder-decoders as two graphs, run in onnxruntime by the names that optimum and transformers.js know."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, GenerationMixin, PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.measure.samples.pairs import PairReader, choose_pairs
from ckpt_prune.onnx.pairs import make_pair_case
from ckpt_prune.onnx.quantization.blocks import BlockRounding, round_by_gptq, round_to_nearest
from ckpt_prune.rounding.damping import damp_for
from ckpt_prune.runtimes import proof
from tests.cli.running import ok, read_json, read_refusal, run
from tests.pairs import choose_cases
from tests.seq2seq import write_model, write_pairs, write_sounds

STEPS = 8
FILES = ("encoder_model", "decoder_model_merged")
ONE_EACH = {"encoder_layers": 1, "decoder_layers": 1}
Feed = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def pairs(place: Path) -> None:
    write_pairs(place / "pairs.jsonl")


def draw_sources(model: PreTrainedModel) -> Feed:
    """Two sources, one of them padded, or two sounds."""
    draw = np.random.default_rng(5)
    if model.main_input_name == "input_features":
        return {"input_features": draw.standard_normal((2, 5, 14), dtype=np.float32)}
    mask = np.array([[1] * 9, [1] * 6 + [0] * 3])
    return {"input_ids": np.where(mask == 1, draw.integers(4, 90, (2, 9)), 1), "attention_mask": mask}


def generate(folder: Path, feed: Feed, start: int) -> np.ndarray[Any, Any]:
    """Take the likeliest token, step by step, as both libraries call such graphs."""
    encoder, decoder = (onnxruntime.InferenceSession(folder / f"{file}.onnx") for file in FILES)
    states = encoder.run(["last_hidden_state"], feed)[0]
    past = [each for each in decoder.get_inputs() if each.name.startswith("past_key_values.")]
    cache = {each.name: np.zeros((2, each.shape[1], 0, each.shape[3]), np.float32) for each in past}
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in cache)]
    mask = {"encoder_attention_mask": feed["attention_mask"]} if "attention_mask" in feed else {}
    tokens = new = np.full((2, 1), start)
    for step in range(STEPS):
        given = {"input_ids": new, "encoder_hidden_states": states, "use_cache_branch": np.array([step > 0])}
        logits, *present = decoder.run(outputs, {**given, **mask, **cache})
        kept = {name: value for name, value in cache.items() if step and ".encoder." in name}
        cache = dict(zip(cache, present, strict=True)) | kept  # what was kept of the encoder is handed on as it was
        new = logits[:, -1:].argmax(-1)
        tokens = np.hstack([tokens, new])
    return tokens


def check_tokens(folder: Path, model: Any) -> None:
    """Both write the tokens that the stock class does, which reads all of them at every step.

    Its own cache has too few layers for a T5 whose decoder is deeper than its encoder.
    """
    feed, start = draw_sources(model), model.generation_config.decoder_start_token_id or 0
    inputs = {name: torch.from_numpy(value) for name, value in feed.items()}
    settings = {
        "decoder_start_token_id": start,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        "forced_bos_token_id": None,
        "num_beams": 1,
    }
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    expected = GenerationMixin.generate(model, **inputs, max_new_tokens=STEPS, do_sample=False, use_cache=False)
    assert generate(folder, feed, start).tolist() == expected.tolist()


def test_one_type_in_all_commands() -> None:
    model = write_model(Path("bart"), "bart", **ONE_EACH)
    kinds = ("--dtype", "fp32", "--dtype", "int4", "--target-bytes", "95KB", "--max-loss", "99%")
    shown = ok("export", "bart", "-o", "bart/onnx", *kinds, "--data", "pairs.jsonl")
    sizes = [Path(f"bart/onnx/{file}_q4.onnx").stat().st_size for file in FILES]
    assert 0.9 * 95_000 < sum(sizes) <= 95_000
    assert re.search(r"^perplexity .*: .* lost, .* predictions the same$", shown, re.MULTILINE)
    assert {each.name for each in Path("bart/onnx").glob("*.onnx")} == {
        *("encoder_model.onnx", "decoder_model_merged.onnx", "encoder_model_q4.onnx", "decoder_model_merged_q4.onnx")
    }
    check_tokens(Path("bart/onnx"), model)
    record = read_json("bart/onnx/ckpt_prune_onnx.json")
    assert [(each["dtype"], each["stack"]) for each in record["graphs"]] == [
        (dtype, stack) for dtype in ("fp32", "int4") for stack in ("encoder", "decoder")
    ]
    ports = [(port["name"], port["shape"]) for port in record["graphs"][1]["inputs"]]
    length, read = "past_sequence_length", "encoder_sequence_length"
    assert ports == [
        ("input_ids", ["batch_size", "sequence_length"]),
        ("encoder_hidden_states", ["batch_size", read, 32]),
        ("encoder_attention_mask", ["batch_size", read]),
        ("past_key_values.0.decoder.key", ["batch_size", 4, length, 8]),
        ("past_key_values.0.decoder.value", ["batch_size", 4, length, 8]),
        ("past_key_values.0.encoder.key", ["batch_size", 4, f"past_{read}", 8]),
        ("past_key_values.0.encoder.value", ["batch_size", 4, f"past_{read}", 8]),
        ("use_cache_branch", [1]),
    ]
    checked = ok("verify", "bart/onnx", "--against", "bart")
    assert checked.count("compared with PyTorch on ") == 4
    validated = run("validate", "bart/onnx", "--data", "pairs.jsonl")
    assert (validated.exit_code, validated.stderr) == (0, "")  # nothing of other data than last time
    ok("validate", "bart/onnx")  # on noise
    cases = read_json("bart/onnx/validation.json")["graphs"][0]["cases"]
    assert {case["output"] for case in cases} == {
        *("logits", "last_hidden_state", "present.*.decoder.*", "present.*.encoder.*")
    }
    card = Path("bart/onnx/README.md").read_text()
    assert re.findall(r"^(\w+): beside bart, on ", card, re.MULTILINE) == ["fp32", "int4"]
    assert "There is no `genai_config.json`: encoder-decoders do not run in genai.\n" in card
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "require_runtime", lambda _runtime: None)  # it need not be installed to be refused
        assert read_refusal("validate", "bart/onnx", "--runtime", "genai") == (
            "bart/onnx holds graphs of both stacks: encoder-decoders do not run in genai"
        )
    code = card.partition("```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("bart/onnx")
        exec(code, scope)
    assert scope["target"].shape == (1, 21)
    together = (
        "of an encoder-decoder, which run together: `ckpt-prune validate bart/onnx --against MODEL --data FILE` "
        "compares them with the model that they were exported from"
    )
    for name, what in (
        ("bart/onnx", "holds graphs of both stacks"),
        ("bart/onnx/encoder_model_q4.onnx", "is the graph of one stack"),
    ):
        refused = read_refusal("evaluate", name, "--against", "bart", "--data", "pairs.jsonl")
        assert refused == f"{name} {what} {together}"
    shutil.copy("bart/onnx/decoder_model_merged_q4.onnx", "bart/onnx/decoder_model_merged.onnx")
    assert re.search(r"^decoder_model_merged.onnx: files +FAILED", run("verify", "bart/onnx").stdout, re.MULTILINE)
    failed = run("validate", "bart/onnx", "--data", "pairs.jsonl")
    assert failed.exit_code == 1
    assert "decoder_model_merged.onnx changed since it was written" in failed.stdout


TYPES = ["m2m_100", "marian", "mt5", "t5", "t5gemma", "whisper"]


@pytest.mark.parametrize("model_type", choose_cases(TYPES, lambda each: each != "mt5"))
def test_other_types(model_type: str) -> None:
    write_model(Path("model"), model_type, **({} if "t5" in model_type else ONE_EACH))
    write_sounds(Path())
    data = "sounds.jsonl" if model_type == "whisper" else "pairs.jsonl"
    rounded = ("--dtype", "int4", "--rounding", "gptq", "--max-loss", "99%")
    ok("export", "model", "-o", "graphs", "--data", data, "--samples", "8", "--dtype", "fp32", *rounded)
    assert "FAILED" not in ok("verify", "graphs", "--against", "model")
    cached = re.findall(r"^\| \w+ \| `([\w.…]+)` and `.value` ", Path("graphs/README.md").read_text(), re.MULTILINE)
    numbers = "0…2" if "t5" in model_type else "0"  # T5's later blocks lack a table; t5gemma counts by other keys
    layers = [f"{prefix}.{numbers}." for prefix in ("past_key_values", "present")]
    assert cached == [f"{each}{stack}.key" for each in layers for stack in ("decoder", "encoder")]
    auto = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    check_tokens(Path("graphs"), auto.from_pretrained("model").eval())
    check_rounding(auto.from_pretrained("model").eval(), Path(data))


@torch.no_grad()
def check_rounding(model: Any, data: Path) -> None:
    """Weights of both graphs are rounded by what the stock model multiplies them with, on other pairs than the proof's.

    It reads one pair at a time, in float64; sums in float32 may round a weight in a hundred otherwise.
    """
    window = 16 if model.main_input_name == "input_features" else 64
    pairs = choose_pairs(
        PairReader(Checkpoint.open(Path("model")), window), data, "decoder", samples=None, seed=None, skip=8
    )
    read: dict[str, list[torch.Tensor]] = {}
    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    for name, module in linears.items():
        rows = read.setdefault(name, [])
        module.register_forward_pre_hook(lambda _module, args, rows=rows: rows.append(args[0].flatten(0, -2)))
    for row in range(len(pairs) * 128 // 160):
        model.double()(
            **{
                name: each.double() if each.is_floating_point() else each
                for name, each in make_pair_case(pairs, row, row + 1).feed.items()
            }
        )
    for file in FILES:
        plain, rounded = (onnx_ir.load(f"graphs/{file}{kind}.onnx").graph.initializers for kind in ("", "_q4"))
        arrays = {name: value.const_value.numpy() for name, value in plain.items() if f"{name}_Q4" in rounded}
        checked = 0
        for name, module in linears.items():
            matrix = module.weight.detach().float().numpy().T
            found = next((each for each, array in arrays.items() if np.array_equal(array, matrix)), None)
            if found is None:
                continue
            codes, x = rounded[f"{found}_Q4"].const_value.numpy(), torch.cat(read[name])
            grid = BlockRounding(4, 2 * codes.shape[2], symmetric=False)
            expected = round_by_gptq(matrix, x.T @ x, grid, damp=damp_for(len(matrix), len(x)))
            assert (codes != expected.packed).mean() < 0.02
            assert (codes != round_to_nearest(matrix, grid).packed).mean() > 0.02
            checked += 1
        assert checked


def test_a_recipe_ends_in_both_graphs() -> None:
    """They are of the output with both stacks, and the stack that is pruned first has none."""
    write_model(Path("bart"), "bart", **ONE_EACH)
    ridge = ("--recipe", "ridge", "--ratio", "0.25", "--data", "pairs.jsonl", "--set", "export.format=onnx")
    ok("prune", "bart", *ridge, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "bart")
    check_tokens(Path("out/onnx"), AutoModelForSeq2SeqLM.from_pretrained("out").eval())
    report = read_json("out/onnx/validation.json")["graphs"][0]
    assert report["data"]["what"] == "pairs.jsonl"


def test_what_cannot_be_exported_is_refused() -> None:
    write_model(Path("bart"), "bart", **ONE_EACH)

    def says(*words: str) -> str:
        result = run("export", "bart", "-o", "out", *words)
        assert (result.exit_code, Path("out").exists()) == (2, False)
        return result.stderr.splitlines()[-1].removeprefix("Error: ")

    refused = says("--dtype", "int4", "--target-bytes", "50KB", "--data", "pairs.jsonl")
    assert re.match(
        r"graphs of 50 KB together are out of reach: with all weights in blocks of 4 bits they have [\d.]+ KB; ask ",
        refused,
    ), refused
    assert says("--task", "feature-extraction") == (
        "this model is for text2text-generation: it becomes two graphs, of its encoder and of its decoder"
    )
    assert says("--no-cache") == (
        "a decoder's graph for text2text-generation keeps keys and values: leave out --no-cache"
    )
    assert says("--text", "pairs.jsonl") == "bart reads pairs of a source and its target: give --data FILE"
