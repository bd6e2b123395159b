"""Every family, pruned from statistics and loaded with stock transformers, against pruning a whole model in memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import (
    BLOCKS,
    VARIANTS,
    calibrate,
    job_on,
    logits,
    make,
    one_group,
    prune,
    recipe,
    stock,
    windows,
)
from tests.pairs import pairwise
from tests.refusals import refusal

# Whether a bias is added decides on the container: every variant with and without, and every method on several.


@pytest.mark.parametrize(
    ("variant", "dtype", "shard"),
    pairwise(["llama", "qwen2", "seed_oss-biases-mha"], [torch.bfloat16, torch.float16], [None, "8KB"]),
)
def test_names_dtypes_and_untouched_rows_stay(sources, variant, dtype, shard, tmp_path):
    folder = sources.folder(variant, dtype, shard)
    report = prune(job_on(folder, recipe("none", "magnitude", heads=one_group(variant))), tmp_path / "out")
    files = sorted(path.name for path in folder.glob("*.safetensors*"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors*")) == files
    assert (len(files) > 2) == (shard is not None)
    group = 4 // VARIANTS[variant].kv_heads
    head_dim = VARIANTS[variant].config.get("head_dim", 4)
    for file in files[: len(files) - (shard is not None)]:
        before, after = load_file(folder / file), load_file(tmp_path / "out" / file)
        assert list(before) == list(after)
        for name, tensor in before.items():
            assert after[name].dtype == dtype
            block = int(name.split(".")[2]) if "layers" in name else None
            units = {s["space"]: torch.tensor(s["kept"]) for s in report["sites"] if s["block"] == block}
            if "k_proj" in name or "v_proj" in name:
                tensor = tensor.unflatten(0, (-1, head_dim))[units["heads"]].flatten(0, 1)
            elif "q_proj" in name:
                tensor = tensor.unflatten(0, (-1, group * head_dim))[units["heads"]].flatten(0, 1)
            elif "o_proj.weight" in name:
                tensor = tensor.unflatten(1, (-1, group * head_dim))[:, units["heads"]].flatten(1)
            elif "gate_proj" in name or "up_proj" in name:
                tensor = tensor[units["mlp"]]
            elif "down_proj.weight" in name:
                tensor = tensor[:, units["mlp"]]
            assert torch.equal(after[name], tensor), name
    assert stock(tmp_path / "out").dtype == dtype


def test_a_copy_of_the_embedding_that_is_stored_as_the_tied_head_is_left_out(sources, tmp_path):
    folder = make(tmp_path / "dense", "qwen2")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    full_recipe, ids = recipe("ridge", heads=0.5, target="sequential"), windows(2, 10)
    prune(job_on(folder, full_recipe, live=windows()), tmp_path / "stored")
    prune(job_on(sources.folder("qwen2"), full_recipe, live=windows()), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "stored" / "model.safetensors")
    assert torch.equal(logits(stock(tmp_path / "stored"), ids), logits(stock(tmp_path / "tied"), ids))


def test_frequencies_that_old_checkpoints_store_are_carried_and_ignored(sources, tmp_path):
    """Frequencies stored as in the first LLaMA conversions, one vector for each block, are carried and ignored."""
    folder = make(tmp_path / "dense", "llama")
    stored = {
        f"model.layers.{block}.self_attn.rotary_emb.inv_freq": torch.tensor([1.0, 0.01]) for block in range(BLOCKS)
    }
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", {"format": "pt"})
    full_recipe = recipe("ridge", target="sequential")
    old = job_on(folder, full_recipe, live=windows())
    prune(old, tmp_path / "old")
    prune(job_on(sources.folder("llama"), full_recipe, live=windows()), tmp_path / "new")
    ids = windows(2, 10)
    assert torch.equal(logits(stock(tmp_path / "old"), ids), logits(stock(tmp_path / "new"), ids))
    assert stored.keys() <= load_file(tmp_path / "old" / "model.safetensors").keys()
    assert old.after.parameters == stock(tmp_path / "old").num_parameters()
    assert calibrate(folder, tmp_path / "statistics").index.blocks == BLOCKS


def test_a_fold_that_overflows_half_precision_is_refused(sources, tmp_path):
    """Values of v near 200 through weights near 2e4: each fits float16, the mean of what is dropped does not."""
    folder = make(tmp_path / "dense", "llama-biases", dtype=torch.float16)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.bias"].fill_(200)
    weights["model.layers.1.self_attn.o_proj.weight"].fill_(2e4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    statistics = calibrate(folder, tmp_path / "statistics")
    assert refusal(prune, job_on(folder, recipe("bias", heads=0.5, mlp=None), statistics), tmp_path / "out") == (
        "model.layers.1.self_attn.o_proj.bias: the new tensor does not fit its dtype torch.float16: "
        "use a gentler recipe"
    )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
