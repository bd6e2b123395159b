"""Heads that are stored and tied at once, as merging tools write them: outputs follow what transformers computes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ckpt_prune
from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.verification.verify import verify
from tests.cli.running import TEXT, edit_weights, ok, read_json, run
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.pairs import dealt, one_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
RECIPES = {
    "slicegpt-shared": ("--set", "hidden.multiple_of=2"),
    "slicegpt": ("--set", "hidden.multiple_of=2"),
    "ridge": ("--ratio", "0.5", "--container", "any"),
}
IDS = torch.arange(3, 19)[None]


def edit_file(folder: str, **tensors: torch.Tensor) -> None:
    """Store these tensors beside the others, or in place of them."""
    path = Path(folder, "model.safetensors")
    save_file(load_file(path) | {name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


@pytest.fixture
def here(place: Path) -> Path:
    """One tied model four times: plain, with an equal copy, with another head, and with the head alone."""
    torch.manual_seed(3)
    with quiet_transformers():
        model = tiny_llama(max_position_embeddings=32, tie_word_embeddings=True, num_hidden_layers=3)
        model.model.norm.weight.data.uniform_(0.2, 2.2)  # with gains of one, applying them twice changes nothing
        for name in ("plain", "copy", "differs", "head-alone"):
            model.save_pretrained(name)
            tiny_tokenizer("<s> $A").save_pretrained(name)
    table = load_file("plain/model.safetensors")[EMBEDDING]
    edit_file("copy", **{HEAD: table})
    edit_file("differs", **{HEAD: table.flip(0)})
    path = Path("head-alone/model.safetensors")
    tensors = load_file(path)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save_file(tensors, path, {"format": "pt"})
    return place


@torch.no_grad()
def logits(folder: str) -> torch.Tensor:
    """Logits of a folder as stock transformers loads it, or of an output with its own code."""
    with quiet_transformers():
        own_code = "auto_map" in read_json(f"{folder}/config.json")
        model = ckpt_prune.load(folder) if own_code else AutoModelForCausalLM.from_pretrained(folder)
        values: torch.Tensor = model.float().eval()(IDS).logits
    return values


@pytest.mark.parametrize(("model", "recipe"), one_of(2, dealt(["copy", "head-alone"], list(RECIPES), 2)))
def test_a_stored_copy_changes_nothing(here, model, recipe) -> None:
    assert torch.equal(logits(model), logits("plain"))
    for source in ("plain", model):
        ok("prune", source, "--recipe", recipe, *RECIPES[recipe], *TEXT, "-o", f"out-{source}")
    assert torch.equal(logits(f"out-{model}"), logits("out-plain"))
    assert run("verify", f"out-{model}", "--against", model).exit_code == 0
    ours, theirs = (load_file(f"out-{name}/model.safetensors") for name in (model, "plain"))
    assert ours.keys() == theirs.keys()
    sizes = [json.loads(ok("inspect", f"out-{name}", "--json"))["parameters"] for name in (model, "plain")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("recipe", one_of(3, RECIPES))
def test_a_head_that_differs_is_what_the_class_takes(here, recipe) -> None:
    """The same model with its flag off gives the same outputs."""
    ok("prune", "differs", "--recipe", recipe, *RECIPES[recipe], *TEXT, "-o", "out")
    config = read_json("differs/config.json")
    dense = logits("differs")
    Path("differs/config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert torch.equal(logits("differs"), dense)
    ok("prune", "differs", "--recipe", recipe, *RECIPES[recipe], *TEXT, "-o", "out-untied")
    assert read_json("out/config.json")["tie_word_embeddings"] is False
    assert torch.equal(logits("out"), logits("out-untied"))


DAMAGES = {
    "a head": lambda weights: weights[HEAD].mul_(2),
    "a final norm": lambda weights: weights["model.norm.weight"].mul_(2),
    "an embedding": lambda weights: weights[EMBEDDING].copy_(weights[EMBEDDING].flip(0)),
}
ABSORBING = {"ridge": RECIPES["ridge"], "cayley-rotator-shared-wanda-50": ("--set", "rotation.steps=2")}


@pytest.mark.parametrize("recipe", one_of(2, ABSORBING))
def test_a_wrong_head_fails_verify_though_the_digests_are_right(here, recipe) -> None:
    """A head, final norm or embedding that is wrong fails `verify`, though the report has its digest."""
    ok("prune", "differs", "--recipe", recipe, *ABSORBING[recipe], *TEXT, "-o", "out")
    assert head_is_kept("out", "differs")
    for damage in DAMAGES.values():
        shutil.copytree("out", "bad", dirs_exist_ok=True)
        edit_weights("bad", damage)
        report = read_json("bad/ckpt_prune.json")
        report["files"] |= sha256_files(Path("bad"), ["model.safetensors"])
        Path("bad/ckpt_prune.json").write_text(json.dumps(report))
        assert not head_is_kept("bad", "differs")


def test_gains_that_a_head_applies_twice_fail_verify(here) -> None:
    """A sliced stream's head of its own, beside a final norm that still has the gains of a tied one."""
    ok("prune", "plain", "--recipe", "slicegpt-shared", *RECIPES["slicegpt-shared"], *TEXT, "-o", "out")
    assert head_is_kept("out", "plain")
    table = load_file("out/model.safetensors")[EMBEDDING]
    gains = load_file("plain/model.safetensors")["model.norm.weight"]
    edit_file("out", **{HEAD: table * gains[: table.shape[1]]})
    assert not head_is_kept("out", "plain")


def head_is_kept(out: str, dense: str) -> bool:
    """Tell whether `verify` passes the head: in its own line if it has absorbed a matrix, else among kept units."""
    verdicts = {check.name: check.passed for check in verify(Path(out), Path(dense))}
    return verdicts.get("head", verdicts["kept units"]) is True


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_head_stored_more_coarsely_than_the_embedding_passes_verify(here, stored) -> None:
    """The logits of such a head agree no better than its own dtype allows."""
    head = load_file("differs/model.safetensors")[HEAD]
    edit_file("differs", **{HEAD: head.to(stored)})
    ok("prune", "differs", "--recipe", "slicegpt-shared", *RECIPES["slicegpt-shared"], *TEXT, "-o", "out")
    assert load_file("out/model.safetensors")[HEAD].dtype == stored
    assert "FAILED" not in ok("verify", "out", "--against", "differs")
