"""Encoder-decoders through the commands that take pairs, against the stock model pruned by hand in float64."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedModel,
    T5EncoderModel,
    UMT5EncoderModel,
)

from ckpt_prune.model.composites import encoder_decoders
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.discovery import discover
from tests.cli.running import edit_weights, ok, read_json, read_refusal, run
from tests.encoders import STRENGTH
from tests.hub_server import Hub, Repo
from tests.interrupting import stop_before
from tests.oracles import closed_forms, scores
from tests.pairs import choose_cases, every
from tests.seq2seq import NESTED, STACKS, WORDS, write_model, write_pairs, write_sounds

DATA = ("--data", "pairs.jsonl", "--samples", "24", "--choose", "first")
RIDGE = (
    "--recipe",
    "ridge",
    "--ratio",
    "0.25",
    "--set",
    f"spaces.mlp.compensation.lambda={STRENGTH}",
    "--set",
    "target=dense",
)
LAYERS = {"encoder": ("encoder_layers", "encoder_ffn_dim"), "decoder": ("decoder_layers", "decoder_ffn_dim")}


@pytest.fixture
def bart(place: Path) -> PreTrainedModel:
    write_pairs(place / "pairs.jsonl")
    return write_model(place / "bart", "bart")


def texts(count: int) -> list[dict[str, Tensor]]:
    """The first pairs, each as a stock model is called with it in training."""
    tokenizer, rows = AutoTokenizer.from_pretrained("bart"), Path("pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(row) for row in rows[:count]]
    return [
        {
            "input_ids": tokenizer(text=pair["source"], return_tensors="pt")["input_ids"],
            "labels": tokenizer(text_target=pair["target"], return_tensors="pt")["input_ids"],
        }
        for pair in pairs
    ]


@torch.no_grad()
def read_by_hand(
    model: PreTrainedModel, paths: Iterable[str], pairs: list[dict[str, Tensor]] | None = None
) -> dict[str, Any]:
    """Return what linear modules read, (tokens, inputs) float64."""
    read: dict[str, list[Tensor]] = {path: [] for path in paths}
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda _module, args, path=path: read[path].append(args[0].flatten(0, -2))
        )
        for path in paths
    ]
    for pair in pairs or texts(24):
        model(**pair)
    for hook in hooks:
        hook.remove()
    return {path: torch.cat(rows).numpy() for path, rows in read.items()}


def scores_by_hand(model: PreTrainedModel, path: str, inputs: Any) -> Any:
    """Return rcpu of the columns of a linear module, (inputs,) float64, which add up to 1."""
    found = scores.SCORES["rcpu"](model.get_submodule(path).weight.detach().numpy(), inputs)
    return found / found.sum()


@torch.no_grad()
def prune_by_hand(
    model: PreTrainedModel,
    paths: list[str],
    ratio: float,
    pairs: list[dict[str, Tensor]] | None = None,
    heads: Mapping[str, int] = MappingProxyType({}),
    alike: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Drop columns of MLPs by score rcpu and refit by ridge, all on the dense model; in float64, edited in place.

    Of the last projections of attention in `heads`, half of the heads go, or of the groups of so many columns; by the
    scores in `alike` if it has some.
    """
    read = read_by_hand(model, [*paths, *heads], pairs)
    for path, X in read.items():
        consumer: Any = model.get_submodule(path)
        W, columns = consumer.weight.numpy(), heads.get(path, 1)
        units = W.shape[1] // columns
        keep = units // 2 if path in heads else units - int(np.ceil(units * ratio))
        by_score = alike.get(path)
        kept_units = scores.kept_units(scores_by_hand(model, path, X) if by_score is None else by_score, columns, keep)
        kept = [unit * columns + column for unit in kept_units for column in range(columns)]
        strength = STRENGTH * float(np.mean(np.sum(X[:, kept] ** 2, axis=0)))
        weight, bias = closed_forms.ridge(W[:, kept], X[:, kept], X @ W.T, strength)
        consumer.weight.zero_()
        consumer.weight[:, kept] = torch.from_numpy(weight)
        assert not bias.any()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_stack_is_pruned_as_by_hand(stack: str, bart: PreTrainedModel) -> None:
    output = ok("prune", "bart", "--part", stack, *RIDGE, *DATA, "-o", "out")
    assert f"of the {stack} part of this bart: it is calibrated on pairs of a source and its target" in output
    assert "16 pairs of pairs.jsonl that it was not calibrated on" in output
    pruned, whole = AutoModelForSeq2SeqLM.from_pretrained("out").double().eval(), bart.double()
    layers, width = LAYERS[stack]
    assert getattr(pruned.config, width) == getattr(whole.config, width) * 3 // 4
    paths = [f"model.{stack}.layers.{block}.fc2" for block in range(getattr(whole.config, layers))]
    prune_by_hand(whole, paths, 0.25)
    with torch.no_grad():
        for pair in texts(6):
            ours, theirs = pruned(**pair).logits, whole(**pair).logits
            assert (ours - theirs).abs().max() <= 5e-4 * theirs.abs().max()  # sums and weights in float32
    checked = ok("verify", "out", "--against", "bart")
    assert "FAILED" not in checked
    assert f"outside the {stack} part are the dense model's, bit for bit" in checked


@pytest.mark.parametrize("model_type", every(2, ["bart", "umt5"]))
def test_flops_are_those_of_both_stacks_and_of_cross_attention(model_type: str, tmp_path: Path) -> None:
    write_model(tmp_path, model_type)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    costs = [cost_of(open_model(str(tmp_path), Opening(part=stack))) for stack in ("encoder", "decoder")]
    ids = torch.full((1, costs[0].tokens or 0), 3)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids, use_cache=False)
    assert {each.flops for each in costs} == {counter.get_total_flops()}


def check_whole(dry: str, output: str) -> None:
    """Sizes of the output stand beside the dense model's, and figures of each stack in turn."""
    report, card = read_json("out/ckpt_prune.json"), Path("out/README.md").read_text()
    sizes = report["whole"]
    stored = [
        sum(each.numel() for each in load_file(f"{folder}/model.safetensors").values()) for folder in ("bart", "out")
    ]
    assert [sizes[key]["parameters"] for key in ("before", "after")] == stored
    encoder, decoder = report["others"][0], report
    for key in ("parameters", "bytes", "flops"):
        assert sizes["before"][key] - sizes["after"][key] == sum(
            each["before"][key] - each["after"][key] for each in (encoder, decoder)
        )
    share = f"{stored[1] / stored[0]:.1%}"
    assert re.search(rf"^\| parameters \|.*\| {share} \|$", card.partition("## How to load it")[0], re.MULTILINE)
    for shown in (dry, output):
        total = shown.partition("all parts together, beside the dense model:\n")[2]
        assert re.search(rf"^parameters .* {share}$", total, re.MULTILINE)
    titles = [f"## {title}, {stack} part" for stack in LAYERS for title in ("Size", "Recipe", "Units")]
    assert [line for line in card.splitlines() if line in titles] == titles


def test_a_dry_run_asks_for_pairs(bart: PreTrainedModel) -> None:
    words = ("prune", "bart", "--ratio", "0.25", "--dry-run")
    asked = "; give --data FILE for it (up to 1024 pairs of at most 64 tokens each side, unless you say --samples)"
    dry = ok(*words)
    assert (dry.count(asked), dry.count("it takes with 1024 samples ")) == (2, 2)
    assert asked not in ok(*words, *DATA)


@pytest.mark.usefixtures("bart")
@pytest.mark.parametrize("words", [("--target-params", "50%"), ("--target-bytes", "1MB"), ("--statistics", "own")])
def test_what_is_of_one_stack_asks_for_its_name(words: tuple[str, str]) -> None:
    of_all = "" if words[0] == "--statistics" else ", or give --ratio, which is of all"
    assert read_refusal("prune", "bart", *words, *DATA, "-o", "out") == (
        f"{words[0]} is of one part: name it with --part encoder or decoder{of_all}"
    )


def test_both_stacks_in_one_call(bart: PreTrainedModel) -> None:
    dry = ok("prune", "bart", *RIDGE, *DATA, "--dry-run")
    assert (dry.count("checked, nothing written"), Path("out").exists()) == (2, False)
    result = run("prune", "bart", *RIDGE, *DATA, "-o", "out")
    output = result.stdout
    counts = [result.stderr.count(f"spaces of bart ({stack}) are found and proven") for stack in ("encoder", "decoder")]
    assert (result.exit_code, counts) == (0, [1, 1])
    check_whole(dry, output)
    why = "its class makes them as wide together as the hidden size, however many there are"
    assert output.count(f"spaces.heads is left out: heads stay whole: {why}\n") == 2
    assert output.index("of the encoder part of this bart") < output.index("of the decoder part of this bart")
    assert (output.count("written to out\n"), Path("out.encoder").exists()) == (1, False)
    report = read_json("out/ckpt_prune.json")
    assert (report["part"], report["source"]["name"]) == ("decoder", "bart")
    assert [other["part"] for other in report["others"]] == ["encoder"]
    checked = ok("verify", "out", "--against", "bart")
    assert "FAILED" not in checked
    assert "kept units (encoder): " in checked
    assert "tensors outside the decoder and encoder parts are the dense model's, bit for bit\n" in checked
    pruned, whole = AutoModelForSeq2SeqLM.from_pretrained("out").double().eval(), bart.double()
    for stack, (layers, _) in LAYERS.items():  # the decoder behind the pruned encoder
        prune_by_hand(
            whole, [f"model.{stack}.layers.{block}.fc2" for block in range(getattr(whole.config, layers))], 0.25
        )
    with torch.no_grad():
        for pair in texts(6):
            ours, theirs = pruned(**pair).logits, whole(**pair).logits
            assert (ours - theirs).abs().max() <= 5e-4 * theirs.abs().max()
    ok("prune", "bart", "--part", "encoder", *RIDGE, *DATA, "-o", "first")
    ok("prune", "first", "--part", "decoder", *RIDGE, *DATA, "-o", "second")
    assert Path("second/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    again = read_json("second/ckpt_prune.json")  # it is measured beside the dense model, not beside the first
    assert again["loss"] == report["loss"]
    assert "masked before" not in ok("prune", "bart", "--recipe", "wanda", *DATA, "-o", "masked")
    assert ok("prune", "masked", "--part", "encoder", *RIDGE, *DATA, "--dry-run").count("masked before") == 1

    def shift(tensors):
        tensors["model.encoder.layers.0.fc1.weight"] += 1

    edit_weights("out", shift)
    failed = run("verify", "out", "--against", "bart").stdout
    assert re.search(r"^kept units \(encoder\) +FAILED$", failed, re.MULTILINE)
    assert re.search(r"^kept units \(decoder\) +ok$", failed, re.MULTILINE)


@pytest.mark.parametrize("model_type", every(3, ["bart", "t5", "t5gemma2"]))
def test_blocks_of_both_stacks_go(model_type: str, place: Path, bart: PreTrainedModel) -> None:
    """What stays computes what the stock model computes with the same lists of blocks without those that are gone."""
    whole: Any = write_model(place / model_type, model_type)
    dropped = ("--set", "depth.choose=cosine", "--set", "depth.drop=1")
    plain = ("--set", "depth.compensation.method=none", "--set", "depth.compensation.lambda_by=null")
    ok("prune", model_type, "--recipe", "depth", *dropped, *plain, *DATA, "-o", "out")
    checked = ok("verify", "out", "--against", model_type)
    assert "FAILED" not in checked
    pruned = AutoModelForSeq2SeqLM.from_pretrained("out").eval()
    last = read_json("out/ckpt_prune.json")
    for report in (last, *last["others"]):
        text = ".text_model" if model_type == "t5gemma2" and report["part"] == "encoder" else ""
        stack = whole.get_submodule(f"{'' if model_type == 't5' else 'model.'}{report['part']}{text}")
        blocks = stack.block if model_type == "t5" else stack.layers
        kept = torch.nn.ModuleList(blocks[number] for number in report["depth"]["kept"])
        assert len(kept) == len(blocks) - 1
        setattr(stack, "block" if model_type == "t5" else "layers", kept)
    with torch.no_grad():
        for pair in texts(3):
            torch.testing.assert_close(pruned(**pair).logits, whole(**pair).logits)


@pytest.mark.usefixtures("bart")
def test_both_stacks_of_a_hub_id(hub: Hub) -> None:
    hub.repos["ada/bart"] = Repo(private=False)
    hub.repos["ada/bart"].commit({path.name: path.read_bytes() for path in Path("bart").iterdir()}, "weights")
    assert ok("prune", "ada/bart", *RIDGE, "--dry-run").count("checked, nothing written") == 2
    Path("calib.txt").write_text("w1 w2 w3")
    refused = run("prune", "ada/bart", *RIDGE, "--text", "calib.txt", "-o", "out")
    assert refused.stderr.splitlines()[-1] == (
        "Error: ada/bart reads pairs of a source and its target: give --data FILE"
    )


@pytest.mark.usefixtures("bart")
def test_both_stacks_are_described() -> None:
    shown = ok("inspect", "bart")
    assert shown.index("encoder part\nmodel ") < shown.index("\ndecoder part\nmodel ")
    assert "all stay" not in shown
    described = json.loads(ok("inspect", "bart", "--json"))
    assert [(name, each["spaces"]["mlp"]["units"]) for name, each in described["parts"].items()] == [
        ("encoder", STACKS["encoder_ffn_dim"]),
        ("decoder", STACKS["decoder_ffn_dim"]),
    ]
    assert json.loads(ok("inspect", "bart", "--part", "decoder", "--json")) == described["parts"]["decoder"]


@pytest.mark.usefixtures("bart")
def test_measured_once_and_evaluated() -> None:
    ok("calibrate", "bart", "--part", "decoder", *DATA, "-o", "own")
    assert read_json("own/statistics.json")["modality"] == "pairs"
    ok("prune", "bart", "--part", "decoder", *RIDGE, "--statistics", "own", "-o", "out")
    ok("prune", "bart", "--part", "decoder", *RIDGE, *DATA, "-o", "live")
    ours, live = (load_file(f"{out}/model.safetensors") for out in ("out", "live"))
    for name, tensor in ours.items():  # the same sums over other folds, in float32
        torch.testing.assert_close(tensor, live[name], rtol=1e-4, atol=1e-5)
    result = json.loads(ok("evaluate", "out", "--against", "bart", "--data", "pairs.jsonl", "--json"))
    assert (result["pairs"], result["kl"] > 0, "window" in result) == (40, True, False)
    shown = ok("evaluate", "out", "--against", "bart", "--data", "pairs.jsonl", "--samples", "20")
    assert "before: bart, after: out; 20 pairs of pairs.jsonl\n" in shown
    assert re.search(r"\b20 pairs of pairs.jsonl\b", Path("out/README.md").read_text())
    assert read_json("out/ckpt_prune.json")["loss"]["data"] == "20 pairs of pairs.jsonl"
    assert "window" not in shown
    alone = ok("evaluate", "bart", "--data", "pairs.jsonl")
    assert re.fullmatch(r"model +perplexity +pairs +tokens", alone.splitlines()[0])
    assert "measured on 40 pairs of pairs.jsonl\n" in alone
    alone = json.loads(ok("evaluate", "bart", "--data", "pairs.jsonl", "--json"))
    assert alone["nll"] == pytest.approx(result["against"]["nll"])


@pytest.mark.usefixtures("bart")
def test_what_cannot_be_read_is_refused() -> None:
    assert read_refusal("calibrate", "bart", *DATA, "-o", "out") == (
        "bart has two stacks of blocks: --part encoder or --part decoder names one"
    )
    assert read_refusal("quantize", "bart", "--format", "int8", "-o", "out") == (
        "bart is an encoder-decoder: quantize takes models with one stack of blocks alone"
    )
    assert read_refusal("export", "bart", "--format", "gguf", "-o", "out") == (
        "bart is an encoder-decoder: export to a GGUF file takes models with one stack of blocks, and t5, mt5 and umt5"
    )
    assert read_refusal("benchmark", "bart", "bart") == (
        "bart is an encoder-decoder: benchmark takes models with one stack of blocks alone"
    )
    assert read_refusal("prune", "bart", *RIDGE, *DATA, "--vision-ratio", "0.5", "-o", "out") == (
        "--vision-recipe and --vision-ratio are for a vision tower, which bart has none of"
    )
    Path("calib.txt").write_text("w1 w2 w3")

    def says(*words: str) -> str:
        """The last line: the first one tells what was found of a class that nobody described."""
        result = run("prune", "bart", "--part", "decoder", *RIDGE, *words, "-o", "out")
        assert (result.exit_code, Path("out").exists(), Path("out.partial").exists()) == (2, False, False)
        return result.stderr.splitlines()[-1].removeprefix("Error: ")

    assert says(*DATA, "--bos", "never") == (
        "--bos, --choose offsets and --choose documents are for --text: they do not go with --data"
    )


@pytest.mark.usefixtures("bart")
@pytest.mark.parametrize("words", [("prune", "bart", *RIDGE), ("prune", "bart", "--part", "decoder", *RIDGE)])
def test_data_are_refused_before_spaces_are_proven(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "discover", None)
    Path("calib.txt").write_text("w1 w2 w3")
    calibrate, out = ("calibrate", "bart", "--part", "decoder"), ("-o", "out")
    lacking = "recipe ridge needs statistics: give --data FILE to measure them, or --statistics STATS"
    assert read_refusal(*words, *out) == lacking
    for each in ((*words, *out), (*words, "--dry-run"), (*calibrate, *out)):
        assert read_refusal(*each, "--text", "calib.txt") == (
            "bart reads pairs of a source and its target: give --data FILE"
        )
    Path("pairs.jsonl").write_text('{"text": "w1"}\n')
    for each in ((*words, *out), (*words, "--dry-run"), (*calibrate, *out)):
        assert read_refusal(*each, *DATA) == (
            'pairs.jsonl, line 1: no source with its target; each row must be {"source": "…", "target": "…"}'
        )


@pytest.mark.usefixtures("bart")
def test_texts_are_refused_before_anything_is_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("calib.txt").write_text("w1 w2 w3")
    words, says = (
        ("evaluate", "bart", "--against", "bart", "--text", "calib.txt"),
        ("bart is for text2text-generation: measure it on pairs of a source and its target, with --data"),
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ckpt_prune.runner.evaluate", None)  # not even that is imported
        assert read_refusal(*words) == says
    assert read_refusal(*words, "--window", "8") == says
    config = read_json("bart/config.json")
    Path("bart/config.json").write_text(json.dumps(config | {"model_type": "whisper"}))
    assert read_refusal(*words) == (
        "bart is for automatic-speech-recognition: measure it on audio with its text, with --data"
    )


OTHERS = [each for each in encoder_decoders() if each not in ("bart", "pegasus_x")]


@pytest.mark.usefixtures("bart")
@pytest.mark.parametrize("model_type", choose_cases(OTHERS, lambda each: each == "m2m_100"))
def test_other_types(model_type: str) -> None:
    write_model(Path("other"), model_type)
    ok("prune", "other", "--recipe", "ridge", "--ratio", "0.25", *DATA, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "other")
    config = AutoModelForSeq2SeqLM.from_pretrained("out").config
    if model_type in NESTED:
        own = config.encoder if model_type == "t5gemma" else config.encoder.text_config
        assert (own.intermediate_size, config.decoder.intermediate_size) == (36, 42)
        return
    widths = {config.d_ff: 36} if "t5" in model_type else {config.encoder_ffn_dim: 36, config.decoder_ffn_dim: 42}
    assert all(width == expected for width, expected in widths.items())


@pytest.mark.usefixtures("bart")
def test_a_stack_without_spaces_names_the_other() -> None:
    write_model(Path("other"), "pegasus_x", block_size=8, num_global_tokens=4)
    for words in (("inspect", "other"), ("prune", "other", *RIDGE, *DATA, "-o", "out")):
        assert read_refusal(*words) == (
            "no space of the encoder of PegasusXForConditionalGeneration was found: queries and heads: no linear "
            "module that runs once in a block reads what mixes tokens; --part decoder names its other stack"
        )
    ok("prune", "other", "--part", "decoder", *RIDGE, *DATA, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "other")
    assert read_json("out/config.json")["decoder_ffn_dim"] == 42


HEADS = {
    "t5gemma": ("model.{stack}.layers.{block}.", ("self_attn.o_proj",), ("cross_attn.o_proj",), "mlp.down_proj", 16),
    "umt5": (
        "{stack}.block.{block}.layer.",
        ("0.SelfAttention.o",),
        ("1.EncDecAttention.o",),
        "{last}.DenseReluDense.wo",
        8,
    ),
}
"""Type → prefix of a block, consumers of self-attention and cross-attention, and of the MLP, and columns of a unit."""
ALIKE = ("t5", "mt5", "longt5")
"""Types whose blocks of a stack all keep the same heads of self-attention."""
HEADS |= dict.fromkeys(ALIKE, HEADS["umt5"])
HEADS["t5gemma2"] = (HEADS["t5gemma"][0], HEADS["t5gemma"][1], (), *HEADS["t5gemma"][3:])  # of both in one
CASES = [(each, "sequential" if each in ("t5", "longt5") else "dense") for each in HEADS]


@pytest.mark.usefixtures("bart")
@pytest.mark.parametrize(("model_type", "target"), choose_cases(CASES, lambda each: each[0] == "t5gemma2"))
def test_heads_of_both_attentions_are_pruned_as_by_hand(model_type: str, target: str) -> None:
    """Each attention of each block loses heads of its own, or those that all do; one key counts them."""
    whole = write_model(Path("other"), model_type).double()
    if model_type == "t5":  # one block has much larger outputs than the others, and does not decide alone
        whole.get_submodule("decoder.block.2.layer.0.SelfAttention.o").weight.data *= 16
        edit_weights("other", lambda tensors: tensors["decoder.block.2.layer.0.SelfAttention.o.weight"].mul_(16))
    fitted = ("--set", f"spaces.heads.compensation.lambda={STRENGTH}", "--set", "spaces.heads.ratio=0.5")
    if model_type == "t5gemma":  # a class that is told how many query heads read one key
        beside = {"score": "rcpu", "compensation.method": "ridge", "ratio": 0.5}
        queries = [word for key, value in beside.items() for word in ("--set", f"spaces.queries.{key}={value}")]
        ok("prune", "other", "--part", "encoder", "--recipe", "ridge", *queries, *DATA, "-o", "fewer")
        assert read_json("fewer/config.json")["encoder"]["num_attention_heads"] == 2
    words = ("prune", "other", *RIDGE[:-1], f"target={target}", *fitted, *DATA, "-o")
    output = ok(*words, "out")
    assert ("spaces.cross_heads is added: " in output) == (model_type != "t5gemma2")
    assert "FAILED" not in ok("verify", "out", "--against", "other")
    pruned = AutoModelForSeq2SeqLM.from_pretrained("out").double().eval()
    prefix, own, cross, mlp, columns = HEADS[model_type]
    for stack, blocks in (("encoder", 2), ("decoder", 3)):
        within = ".text_model" if (model_type, stack) == ("t5gemma2", "encoder") else ""
        starts = [prefix.format(stack=stack + within, block=block) for block in range(blocks)]
        consumers = own if stack == "encoder" else own + cross
        attention = own[0].replace("Self", "LocalSelf") if (model_type, stack) == ("longt5", "encoder") else own[0]
        consumers = (attention, *consumers[1:])
        alike = {}
        if model_type in ALIKE:
            read = read_by_hand(whole, [start + attention for start in starts])
            alike = dict.fromkeys(read, sum(scores_by_hand(whole, path, inputs) for path, inputs in read.items()))
        heads = {start + consumer: columns for start in starts for consumer in consumers}
        ends = {start: start + mlp.format(last=len(consumers)) for start in starts}
        if target == "dense":
            prune_by_hand(whole, [*ends.values()], 0.25, heads=heads, alike=alike)
        for start, end in ends.items() if target == "sequential" else ():
            for consumer in consumers:  # each is fitted to what reaches it behind those before it
                prune_by_hand(whole, [], 0.25, heads={start + consumer: columns}, alike=alike)
            prune_by_hand(whole, [end], 0.25)
    config = pruned.config
    counts = (
        [
            (each.num_attention_heads, each.num_key_value_heads)
            for each in (config.encoder.get_text_config(), config.decoder)
        ]
        if model_type in NESTED
        else [config.num_heads]
    )
    assert counts == ([(2, 1), (2, 1)] if model_type in NESTED else [2])
    with torch.no_grad():
        for pair in texts(6):
            ours, theirs = pruned(**pair).logits, whole(**pair).logits
            assert (ours - theirs).abs().max() <= 5e-4 * theirs.abs().max()
    if model_type == "t5":
        check_same_heads(words)


def check_same_heads(words: Sequence[str]) -> None:
    """A run that was stopped in its decoder drops the same heads of every block, and `verify` sees if it did not."""
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, "block 2")  # of the decoder
        assert run(*words, "again").exit_code != 0
    ok(*words, "again", "--resume")
    assert Path("again/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    report = read_json("again/ckpt_prune.json")
    kept = [site for site in report["sites"] if site["space"] == "heads"]
    assert len({tuple(site["kept"]) for site in kept}) == 1
    kept[1]["kept"] = [unit for unit in range(4) if unit not in kept[1]["kept"]]
    Path("again/ckpt_prune.json").write_text(json.dumps(report))
    failed = run("verify", "again", "--against", "other").stdout
    assert "ckpt_prune.json keeps different heads in different blocks, which have one table for all" in failed


@pytest.mark.usefixtures("bart")
@pytest.mark.parametrize("method", ["laco", "scales"])
def test_blocks_with_fewer_heads_are_trained(method: str) -> None:
    """They are passed positions of the heads that they have, and the table of these is no part of what is trained."""
    write_model(Path("t5"), "t5")
    recovery = ("--set", f"recovery.method={method}", "--set", "recovery.epochs=1")
    ok("prune", "t5", "--recipe", "ridge", "--ratio", "0.5", *recovery, *DATA, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "t5")


def test_one_width_of_both_stacks(place: Path, bart: PreTrainedModel) -> None:
    """T5 states one width of MLPs for encoder and decoder: neither goes alone."""
    write_model(place / "t5", "t5")
    alone = run("prune", "t5", "--part", "decoder", *RIDGE, *DATA, "-o", "out")
    assert (alone.exit_code, Path("out").exists()) == (2, False)
    assert alone.stderr.splitlines()[-1] == (
        "Error: num_heads of t5 states the width of all stacks of blocks, and the encoder has another than the decoder "
        "would have: prune without --part, by --ratio, takes all to one width: plans and sizes are of one stack"
    )
    planned = ("plan", "t5", "--part", "decoder", "--recipe", "magnitude", "--ratio", "0.25")
    shown = ok(*planned)
    assert "mlp 36/48" in shown
    assert "num_heads of t5 states the width of all stacks of blocks: the others keep as many, and sizes " in shown
    assert "and a plan is of one: it is printed without -o" in run(*planned, "-o", "plan.json").stderr
    assert not Path("plan.json").exists()
    found = run("prune", "t5", "--recipe", "best-uniform", *DATA, "-o", "out")
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1] == (
        "Error: recipe best-uniform finds a width for each stack of blocks, and num_heads of t5 states one for all: "
        "choose a recipe with allocation: uniform, such as ridge"
    )
    default = run("prune", "t5", "--ratio", "0.25", *DATA, "-o", "out", "--dry-run")
    assert "num_heads of t5 states one for all: recipe ridge takes its place" in default.stderr
    assert default.stdout.count("mlp 36/48 (ratio 0.25)") == 2
    assert (
        default.stdout.count(
            "heads: every block loses the same ones, those of the lowest scores summed over all blocks, because the "
            "first block has a table for the heads of all\n"
        )
        == 2
    )
    assert re.search(
        r"^heads +4 x head, the same in all blocks ", ok("inspect", "t5", "--part", "decoder"), re.MULTILINE
    )


@pytest.mark.usefixtures("bart")
def test_heads_stay_where_those_of_the_other_stack_do() -> None:
    write_model(Path("other"), "longt5", encoder_attention_type="transient-global")
    dry = ok("prune", "other", *RIDGE, *DATA, "--dry-run")
    why = "num_heads counts those of both stacks, and those of the other stay whole"
    assert f"spaces.heads is left out: heads stay whole: {why}\n" in dry
    assert dry.count("kept per block: mlp 36/48 (ratio 0.25)\n") == 2


def test_speech_with_its_text(place: Path, bart: PreTrainedModel) -> None:
    """Whisper: the decoder on what the encoder makes of audio, against the stock model on single pairs."""
    whole = write_model(place / "whisper", "whisper").double()
    write_sounds(place)
    sounds = ("--data", "sounds.jsonl", "--samples", "16", "--choose", "first")
    ok("prune", "whisper", "--part", "decoder", *RIDGE, *sounds, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "whisper")
    pruned = AutoModelForSpeechSeq2Seq.from_pretrained("out").double().eval()
    assert pruned.config.decoder_ffn_dim == 42
    tokenizer, rows = AutoTokenizer.from_pretrained("whisper"), Path("sounds.jsonl").read_text().splitlines()
    pairs = [
        {
            "input_features": torch.from_numpy(np.load(row["audio"])).double()[None],
            "labels": tokenizer(text_target=row["text"], return_tensors="pt")["input_ids"],
        }
        for row in map(json.loads, rows)
    ]
    prune_by_hand(whole, [f"model.decoder.layers.{block}.fc2" for block in range(3)], 0.25, pairs[:16])
    loss, tokens = 0.0, 0
    with torch.no_grad():
        for pair in pairs:
            ours, theirs = pruned(**pair), whole(**pair)
            assert (ours.logits - theirs.logits).abs().max() <= 5e-4 * theirs.logits.abs().max()
            loss, tokens = loss + float(ours.loss) * pair["labels"].numel(), tokens + pair["labels"].numel()
    result = json.loads(ok("evaluate", "out", "--data", "sounds.jsonl", "--json"))
    assert (result["nll"], result["tokens"]) == (pytest.approx(loss / tokens, rel=1e-4), tokens)
    ok("prune", "whisper", "--part", "all", *RIDGE, *sounds, "-o", "both")
    config = AutoModelForSpeechSeq2Seq.from_pretrained("both").config
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim) == (36, 42)
    assert "FAILED" not in ok("verify", "both", "--against", "whisper")
    # Without --part, blocks of both stacks go. What stays is as it was.
    ok("prune", "whisper", "--recipe", "shortgpt", "--ratio", "0.4", *sounds, "-o", "short")
    assert "FAILED" not in ok("verify", "short", "--against", "whisper")
    report, whole = read_json("short/ckpt_prune.json"), AutoModelForSpeechSeq2Seq.from_pretrained("whisper").double()
    for each in (report, *report["others"]):
        stack = whole.model.get_submodule(each["part"])
        stack.layers = torch.nn.ModuleList(stack.layers[block] for block in each["depth"]["kept"])
        assert len(stack.layers) < each["depth"]["blocks"]
    short = AutoModelForSpeechSeq2Seq.from_pretrained("short").double()
    with torch.no_grad():
        torch.testing.assert_close(short(**pairs[0]).logits, whole(**pairs[0]).logits, rtol=1e-5, atol=1e-6)
    Path("sounds.jsonl").write_text('{"audio": "no.wav", "text": "w1"}\n')
    refused = run("prune", "whisper", "--part", "decoder", *RIDGE, *sounds, "-o", "again")
    assert (refused.exit_code, Path("again").exists()) == (2, False)
    assert refused.stderr.splitlines()[-1] == (
        "Error: sounds.jsonl, line 1: no sound no.wav; sounds are .npy .safetensors .wav, named relative to the file "
        "of rows"
    )


@pytest.mark.parametrize("architecture", [T5EncoderModel, UMT5EncoderModel])
def test_an_encoder_that_stands_alone(architecture: type[PreTrainedModel]) -> None:
    """Embedders and generators of images store one: it reads texts, and what stays computes the same."""
    whole = write_model(Path("alone"), architecture.__name__.removesuffix("EncoderModel").lower())
    dense = architecture(whole.config)
    dense.load_state_dict(whole.state_dict(), strict=False)
    dense.eval().save_pretrained("alone")
    Path("text.txt").write_text(" ".join(WORDS) * 40)
    text = ("--text", "text.txt", "--samples", "8", "--window", "16")
    assert "same" in ok("inspect", "alone")
    ok("prune", "alone", "--recipe", "ridge", "--ratio", "0.5", *text, "-o", "out")
    assert "FAILED" not in ok("verify", "out", "--against", "alone")
    assert "cosine" in ok("evaluate", "out", "--against", "alone", *text)

    ok("prune", "alone", "--recipe", "magnitude", "--ratio", "0.5", "-o", "cut")
    pruned = AutoModelForTextEncoding.from_pretrained("cut")
    assert type(pruned) is architecture
    assert pruned.config.num_heads == 2
    for site in read_json("cut/ckpt_prune.json")["sites"]:
        path, count = {"heads": ("0.SelfAttention.o", 4), "mlp": ("1.DenseReluDense.wo", 48)}[site["space"]]
        weight = dense.get_parameter(f"encoder.block.{site['block']}.layer.{path}.weight").data
        weight.unflatten(1, (count, -1))[:, [unit for unit in range(count) if unit not in site["kept"]]] = 0
    with torch.no_grad():
        ours, theirs = (each(torch.arange(4, 24).view(2, 10))[0] for each in (pruned, dense))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
