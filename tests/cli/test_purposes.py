"""Purposes of models, by class and modules.json: embedders, classifiers and rerankers of causal families."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import ckpt_prune
from ckpt_prune.onnx.tasks import GraphTask, choose_task
from tests.cli.running import ok, read_refusal
from tests.evaluation.tiny import BOS, EOS, VOCAB, tiny_tokenizer
from tests.pairs import choose_cases

_LETTERS = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz     "), (10, 40))
LINES = ["".join(row).strip() for row in _LETTERS]
DATA = ("--text", "calib.txt", "--samples", "8", "--window", "16")
RIDGE = ("--recipe", "ridge", "--ratio", "0.5", "--container", "any", *DATA)
HELD_OUT = ("--text", "held_out.txt", "--window", "12")
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}


def write(folder: str, architecture: str, *, named: str | None = None, **changes: Any) -> Path:
    """A random model of a class, under the name of this or of another class."""
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model_class(model_class.config_class(**SHAPE | changes)).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<unk>"})
    tokenizer.save_pretrained(folder)
    edit(folder, architectures=[named or architecture])
    return Path(folder)


def edit(folder: str, name: str = "config.json", **changes: Any) -> None:
    path = Path(folder) / name
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values | changes))


def write_modules(folder: str, *kinds: str) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, kind in enumerate(kinds, start=1):
        path = f"{index}_{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (Path(folder) / "modules.json").write_text(json.dumps(modules))


def write_embedder(folder: str, architecture: str = "Qwen3Model", pooling: str = "lasttoken", **more: Any) -> Path:
    write(folder, architecture, **more)
    write_modules(folder, "Pooling", "Normalize")
    edit(folder, "1_Pooling/config.json", word_embedding_dimension=16, pooling_mode=pooling)
    return Path(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("calib.txt").write_text("\n".join(LINES * 2))
    Path("held_out.txt").write_text("\n".join(LINES))
    return tmp_path


def embeddings(folder: str, pool: Callable[[Tensor], Tensor], most: int = 12, *, trust: bool = False) -> Tensor:
    """Embed every line alone, by transformers' own base model."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=trust)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for line in LINES:
        ids = torch.tensor([tokenizer(line.strip(), truncation=True, max_length=most)["input_ids"]])
        with torch.no_grad():
            rows.append(pool(model(input_ids=ids).last_hidden_state[0]))
    return torch.stack(rows)


def cosine(out: str, dense: str, pool: Callable[[Tensor], Tensor], *, trust: bool = False) -> float:
    pair = embeddings(out, pool, trust=trust), embeddings(dense, pool)
    return float(functional.cosine_similarity(*pair).mean())


def last(states: Tensor) -> Tensor:
    return states[-1]


EMBEDDERS: dict[str, dict[str, Any]] = {
    "base": {},
    "named after the language model": {"named": "Qwen3ForCausalLM"},
    "without the head that its class would store": {"named": "Qwen3ForCausalLM", "tie_word_embeddings": False},
    "with a head": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": False},
}


@pytest.mark.parametrize("kind", EMBEDDERS)
def test_an_embedder_made_of_a_decoder(here: Path, kind: str) -> None:
    write_embedder("dense", **EMBEDDERS[kind])
    assert "for         sentence-similarity\n" in ok("inspect", "dense")
    ok("prune", "dense", *RIDGE, "-o", "out")
    report = json.loads(ok("evaluate", "out", "--against", "dense", *HELD_OUT, "--json"))
    expected = cosine("out", "dense", last)
    assert (report["texts"], report["cosine"]) == (10, pytest.approx(expected, abs=1e-6))
    assert 0.5 < expected < 0.9999
    ok("verify", "out", "--against", "dense")
    assert json.loads(Path("out/config.json").read_text())["architectures"] == [
        EMBEDDERS[kind].get("named", EMBEDDERS[kind].get("architecture", "Qwen3Model"))
    ]
    heads = [name for name in load_file("dense/model.safetensors") if "lm_head" in name]
    assert all(
        load_file("out/model.safetensors")[name].equal(load_file("dense/model.safetensors")[name]) for name in heads
    )
    assert bool(heads) == (kind == "with a head")
    card = Path("out/README.md").read_text()
    assert "library_name: sentence-transformers\n" in card
    assert "pipeline_tag" not in card
    assert 'AutoModel.from_pretrained("PATH")' in card
    assert 'SentenceTransformer("PATH")' in card


def test_sentence_transformers_loads_own_code_of_an_embedder_with_a_head(here: Path) -> None:
    """flap gives the mlp a bias that the stock class has no slot for; the base model is loaded without the head."""
    write_embedder("dense", "Qwen3ForCausalLM", tie_word_embeddings=False)
    ok("prune", "dense", "--recipe", "flap", "--ratio", "0.5", "--container", "any", *DATA, "-o", "out")
    config = json.loads(Path("out/config.json").read_text())
    assert config["architectures"] == ["PrunedQwen3ForCausalLM"]
    assert config["auto_map"] == {
        "AutoModelForCausalLM": "modeling_pruned.PrunedQwen3ForCausalLM",
        "AutoModel": "modeling_pruned.PrunedQwen3Model",
    }
    report = json.loads(ok("evaluate", "out", "--against", "dense", *HELD_OUT, "--json"))
    assert report["cosine"] == pytest.approx(cosine("out", "dense", last, trust=True), abs=1e-6)


@pytest.mark.parametrize("kind", ["base", "with a head"])
@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("denoise-rotator-wanda-50", "qwen3 cannot be rotated without a vocabulary head ({}): what reads its output "),
        ("slicegpt-shared", "qwen3 keeps all dimensions of its residual stream without a vocabulary head ({}): "),
        ("sleb", "depth.choose: loss is for causal language models: choose: cosine, or divergence"),
        ("ridge-perplexity", "lambda_by: perplexity is for causal language models: choose by folds, or fix lambda"),
    ],
)
def test_measures_of_a_vocabulary_head_are_refused(here: Path, kind: str, recipe: str, why: str) -> None:
    dense = write_embedder("dense", **EMBEDDERS[kind])
    named = json.loads((dense / "config.json").read_text())["architectures"][0]
    assert read_refusal("prune", "dense", "--recipe", recipe, *DATA, "-o", "out").startswith(why.format(named))


def numbers(folder: str, windows: Tensor) -> np.ndarray[Any, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return np.array([float(model(input_ids=row[None]).logits[0, 0]) for row in windows])


def rank_correlation(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """Spearman's, of numbers of which no two are equal."""
    ranks = [scores.argsort().argsort() for scores in (ours, theirs)]
    return float(np.corrcoef(*ranks)[0, 1])


def held_out_windows() -> Tensor:
    ids = AutoTokenizer.from_pretrained("dense")(Path("held_out.txt").read_text(), truncation=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // 12 * 12]).view(-1, 12)


@pytest.mark.parametrize("padding", choose_cases([2, None], lambda padding: padding is None))
def test_a_reward_model_of_a_causal_family(here: Path, padding: int | None) -> None:
    """Without a padding token in its config, several texts are read together as each is alone."""
    write("dense", "LlamaForSequenceClassification", num_labels=1, pad_token_id=padding, num_hidden_layers=1)
    assert "for         text-classification\n" in ok("inspect", "dense")
    ok("prune", "dense", *RIDGE, "-o", "out")
    assert load_file("out/model.safetensors")["score.weight"].equal(
        load_file("dense/model.safetensors")["score.weight"]
    )
    report = json.loads(ok("evaluate", "out", "--against", "dense", *HELD_OUT, "--json"))
    windows = held_out_windows()
    expected = rank_correlation(numbers("out", windows), numbers("dense", windows))
    assert (report["windows"], report["rank_correlation"]) == (len(windows), pytest.approx(expected, abs=1e-9))
    assert 0.3 < expected < 0.9999
    ok("verify", "out", "--against", "dense")
    assert "pipeline_tag: text-classification\n" in Path("out/README.md").read_text()
    assert 'AutoModelForSequenceClassification.from_pretrained("PATH")' in Path("out/README.md").read_text()
    graph = ("export", "out", "-o", "onnx", "--text", "held_out.txt")
    if padding is None:
        assert read_refusal(*graph).startswith(
            "config.json has no pad_token_id, by which the class knows the last token"
        )
        assert read_refusal("prune", "dense", *RIDGE, "--set", "export.format=onnx", "-o", "other").startswith(
            "config.json has no pad_token_id"
        )
        return
    ok(*graph)
    record = json.loads(Path("onnx/ckpt_prune_onnx.json").read_text())
    assert (record["task"], record["cached"]) == ("text-classification", False)
    session = onnxruntime.InferenceSession("onnx/model.onnx", providers=["CPUExecutionProvider"])
    texts = [windows[0, :5], windows[1, :12], windows[2, :9]]
    alone = np.array([numbers("out", text[None])[0] for text in texts])
    for pad_left in (False, True):
        ids = np.full((3, 12), padding)
        for row, text in zip(ids, texts, strict=True):
            row[slice(12 - len(text), 12) if pad_left else slice(len(text))] = text
        # A causal model rotates by position, and what is between two tokens does not change with what stands before.
        (logits,) = session.run(None, {"input_ids": ids, "attention_mask": (ids != padding).astype(np.int64)})
        assert np.abs(logits[:, 0] - alone).max() < 1e-5


@pytest.mark.parametrize(
    ("model", "named", "classes"),
    [
        ("Llama", "LlamaForRewardModel", "LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification, "),
        ("Llama", "LlamaForQuestionAnswering", "LlamaModel, LlamaForSequenceClassification, "),
        ("Cohere", "CohereForSequenceClassification", "CohereModel, CohereForCausalLM"),
    ],
)
def test_a_class_that_is_not_taken_is_named(here: Path, model: str, named: str, classes: str) -> None:
    write("dense", f"{model}Model", named=named)
    tensors = load_file("dense/model.safetensors")
    save_file(tensors | {"score.weight": torch.ones(1, 16)}, "dense/model.safetensors", {"format": "pt"})
    message = f"config.json names {named}, which is not a known class of {model.lower()}; known are {classes}"
    for command in (("inspect", "dense"), ("prune", "dense", *RIDGE, "-o", "out")):
        assert read_refusal(*command).startswith(f"dense: {message}")


@pytest.mark.parametrize("false", [7, None])
def test_a_reranker_by_the_logits_of_two_tokens(here: Path, false: int | None) -> None:
    """Compared by its numbers, and its graph keeps nothing."""
    write("dense", "Qwen3ForCausalLM")
    write_modules("dense", "LogitScore")
    edit("dense", "1_LogitScore/config.json", true_token_id=4, false_token_id=false)
    edit("dense", "sentence_bert_config.json", transformer_task="text-generation")
    edit("dense", "config_sentence_transformers.json", model_type="CrossEncoder")
    assert "for         text-ranking\n" in ok("inspect", "dense")
    ok("prune", "dense", *RIDGE, "-o", "out")
    report = json.loads(ok("evaluate", "out", "--against", "dense", *HELD_OUT, "--json"))
    windows, scores = held_out_windows(), []
    for folder in ("out", "dense"):
        with torch.no_grad():
            logits = ckpt_prune.load(folder)(input_ids=windows).logits[:, -1]
        scores.append((logits[:, 4] - (0 if false is None else logits[:, false])).numpy())
    assert report["rank_correlation"] == pytest.approx(rank_correlation(*scores), abs=1e-9)
    task = choose_task(json.loads(Path("out/config.json").read_text()), folder=Path("out"))
    assert task == GraphTask("text-generation", "text", cached=False)
    assert 'model = CrossEncoder("PATH")' in Path("out/README.md").read_text()


def test_models_for_different_things_are_not_compared(here: Path) -> None:
    write_embedder("embedder")
    write("causal", "Qwen3ForCausalLM")
    assert read_refusal("evaluate", "embedder", "--against", "causal", *HELD_OUT) == (
        "embedder is for sentence-similarity and causal is for text-generation: what they give cannot be compared"
    )
    for options in (("--generate", "the"), ("--tasks", "arc_easy")):
        assert read_refusal("evaluate", "embedder", *options) == (
            "embedder does not generate text: --tasks and --generate are for causal language models"
        )
