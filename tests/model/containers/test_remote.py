"""Outputs that carry their own code: the same model here, in our loader, and where this package is not installed."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import ckpt_prune
from ckpt_prune import modeling_pruned
from ckpt_prune.modeling_pruned import REFUSAL, WEIGHTS_KEY
from ckpt_prune.stages.recipe_files import load_recipe
from tests import encoders, families
from tests.encoders import columns_of
from tests.families import BLOCKS, calibrate, job_on, logits, make, prune, recipe, stock, windows
from tests.oracles.streams import inputs_of
from tests.stages.spaces.oracle import CONSUMERS, per_unit
from tests.stages.test_rotations import random_rotations, rotating
from tests.stored import run_elsewhere

ELSEWHERE = """
import sys, torch
sys.modules["ckpt_prune"] = None  # whoever imports it fails
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.inference_mode():
        found = {"logits": model.eval()(input_ids=ids, use_cache=False).logits}
    found["text"] = model.generate(ids[:1, :6], max_new_tokens=6, do_sample=False, eos_token_id=None)
    torch.save(found, folder + ".pt")
"""
UNEVEN = ["llama-gqa-tied", "qwen3-biases-mha", "seed_oss"]
ROTATED = ["llama-gqa-tied", "qwen3", "opt"]
NAMES = ["qwen3", *UNEVEN]
PROMPT = 6


@pytest.fixture(scope="module")
def remote(sources, tmp_path_factory) -> dict[str, Path]:
    """Every kind of remote-code output: a folder by name, its logits elsewhere beside it in NAME.pt."""
    root = tmp_path_factory.mktemp("remote")
    on_qwen3 = recipe("bias", heads=0.5, container="remote")
    prune(job_on(sources.folder("qwen3"), on_qwen3, sources.statistics("qwen3")), root / "qwen3")
    for variant in UNEVEN:
        uneven = load_recipe("flap-global", ratio=0.4)
        prune(job_on(sources.folder(variant), uneven, sources.statistics(variant)), root / variant)
    rotated = {variant: f"rotated {variant}" for variant in ROTATED}
    for variant, name in rotated.items():
        dense = (families if variant in families.VARIANTS else encoders).make(root / f"dense {variant}", variant)
        with pytest.MonkeyPatch.context() as patch:
            random_rotations(patch)
            prune(encoders.job_on(dense, rotating("per-layer")), root / name)
    torch.save(windows(3, 20, seed=9), root / "ids")
    names = [*NAMES, *rotated.values()]
    run_elsewhere(ELSEWHERE, str(root / "ids"), *(str(root / name) for name in names), root=root)
    return {name: root / name for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits_with_and_without_this_package(remote, name):
    here = logits(ckpt_prune.load(remote[name]), windows(3, 20, seed=9))
    torch.testing.assert_close(torch.load(f"{remote[name]}.pt")["logits"], here, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_generating_with_the_cache_equals_generating_without(remote, name):
    model = ckpt_prune.load(remote[name])
    ids = windows(3, 20, seed=9)[:1, :PROMPT]
    cached = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(torch.load(f"{remote[name]}.pt")["text"], cached)
    for _ in range(6):
        following = logits(model, ids)[:, -1].argmax(-1)
        ids = torch.cat([ids, following[:, None]], 1)
    assert torch.equal(cached, ids)


@pytest.mark.parametrize("variant", ROTATED)
def test_a_stream_that_turns_between_blocks(remote, variant):
    """The dense function, and here the same text."""
    folder, ids = remote[f"rotated {variant}"], windows(3, 20, seed=9)
    elsewhere = torch.load(f"{folder}.pt")
    expected = logits(stock(folder.with_name(f"dense {variant}")), ids)
    torch.testing.assert_close(elsewhere["logits"], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    text = ckpt_prune.load(folder).generate(ids[:1, :PROMPT], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(elsewhere["text"], text)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_implementation_can_be_chosen(remote, implementation):
    model = ckpt_prune.load(remote["seed_oss"])
    ids = windows(3, 20, seed=9)
    expected = logits(model, ids)
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)


def test_global_flap_keeps_other_widths_in_every_block(sources, remote):
    """Against the dense model with the dropped columns zeroed and FLAP's bias from activations."""
    folder = remote["llama-gqa-tied"]
    config = json.loads((folder / "config.json").read_text())
    report = json.loads((folder / "ckpt_prune.json").read_text())
    widths = {(s["block"], s["space"]): len(s["kept"]) for s in report["sites"]}
    assert len({widths[block, "mlp"] for block in range(BLOCKS)}) > 1
    for block in range(BLOCKS):
        block_config = config | config["per_layer_config"].get(str(block), {})
        heads = widths[block, "heads"]
        assert (block_config["num_key_value_heads"], block_config["num_attention_heads"]) == (heads, 2 * heads)
        assert block_config["intermediate_size"] == widths[block, "mlp"]

    dense = stock(sources.folder("llama-gqa-tied"))
    paths = {(s["block"], s["space"]): f"model.layers.{s['block']}.{CONSUMERS[s['space']]}" for s in report["sites"]}
    inputs = inputs_of(dense, paths.values(), windows())
    for site in report["sites"]:
        consumer = dense.get_submodule(paths[site["block"], site["space"]])
        kept = columns_of(site["kept"], per_unit(dense, site["space"]))
        dropped = [j for j in range(consumer.in_features) if j not in kept]
        mean = torch.from_numpy(inputs[paths[site["block"], site["space"]]].mean(0)).float()
        with torch.no_grad():
            consumer.bias = torch.nn.Parameter(consumer.weight[:, dropped] @ mean[dropped])
            consumer.weight[:, dropped] = 0
    ids = windows(3, 20, seed=9)
    torch.testing.assert_close(logits(ckpt_prune.load(folder), ids), logits(dense, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "seed_oss"])
def test_what_is_saved_of_a_loaded_one_is_such_an_output_too(remote, name, tmp_path):
    """Also of one that an earlier version wrote, which stock classes do not refuse."""
    before = json.loads((remote[name] / "config.json").read_text())
    old = tmp_path / "old"
    shutil.copytree(remote[name], old)
    (old / "config.json").write_text(json.dumps({k: v for k, v in before.items() if k != WEIGHTS_KEY}))
    ids = windows(3, 20, seed=9)
    expected = logits(ckpt_prune.load(remote[name]), ids)
    for source in (remote[name], old):
        saved = tmp_path / f"{source.name} saved"
        model = ckpt_prune.load(source)
        assert not hasattr(model.config, WEIGHTS_KEY)
        assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()
        model.save_pretrained(saved)
        again = json.loads((saved / "config.json").read_text())
        assert again == {key: value for key, value in before.items() if key in again or key != "rope_theta"}
        assert (saved / "modeling_pruned.py").read_bytes() == (remote[name] / "modeling_pruned.py").read_bytes()
        with pytest.raises(ValueError, match="this class would misread a model that ckpt_prune has pruned"):
            stock(saved)
        assert torch.equal(logits(ckpt_prune.load(saved), ids), expected)


def test_a_config_that_is_given_by_hand(remote):
    """A config given by hand, as libraries pass it on, loads the same model with trust, and is refused without."""
    config = AutoConfig.from_pretrained(remote["qwen3"])
    assert not hasattr(modeling_pruned.PrunedQwen3Config(**config.to_dict()), WEIGHTS_KEY)
    loaded = modeling_pruned.PrunedQwen3ForCausalLM.from_pretrained(remote["qwen3"], config=config)
    assert getattr(config, WEIGHTS_KEY) == REFUSAL
    ids = windows(3, 20, seed=9)
    assert torch.equal(logits(loaded, ids), logits(ckpt_prune.load(remote["qwen3"]), ids))
    with pytest.raises(ValueError, match="this class would misread a model that ckpt_prune has pruned"):
        stock(remote["qwen3"], config=config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept(tmp_path, dtype):
    folder = make(tmp_path / "dense", "mistral", dtype=dtype)
    statistics = calibrate(folder, tmp_path / "statistics", collect=("moments",))
    prune(job_on(folder, load_recipe("flap-global", ratio=0.4), statistics), tmp_path / "out")
    model = ckpt_prune.load(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    wide = ckpt_prune.load(tmp_path / "out", dtype=torch.float32)
    assert wide.dtype == torch.float32
