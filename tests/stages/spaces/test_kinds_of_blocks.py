"""Blocks with different spaces: mixtures some of whose blocks have one mlp in place of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.model.containers.opening import open_model
from tests.evaluation.tiny import tiny_tokenizer
from tests.families import CONTEXT, SIZES

PLAIN = 1
"""The block with one mlp."""
SHARED, DENSE = 24, 32
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [PLAIN]}
MIXED: dict[str, Any] = {**SIZES, **EXPERTS, "intermediate_size": DENSE, "shared_expert_intermediate_size": SHARED}
LATENT: dict[str, Any] = {
    **{**SIZES, "num_key_value_heads": SIZES["num_attention_heads"], "intermediate_size": DENSE},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
CONFIGS = {"qwen2_moe": MIXED, "qwen3_moe": MIXED, "deepseek_v3": LATENT, "deepseek_v2": LATENT, "minicpm3": LATENT}


def save(folder: Path, model_type: str, **config: Any) -> Path:
    torch.manual_seed(0)
    with quiet_transformers():
        settings = transformers.AutoConfig.for_model(model_type, **config)
        transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder.parent / "calib.txt").write_text("the cat sat on the mat " * 200)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixed")
    return {name: save(root / name, name, head_dim=4, **config) for name, config in CONFIGS.items()}


def test_every_block_is_asked(dense: dict[str, Path]) -> None:
    model = open_model(dense["qwen2_moe"])
    assert (model.blocks_with("heads"), model.blocks_with("shared")) == ([0, 1, 2], [0, 2])
    assert (model.blocks_with("dense"), model.unit_counts("dense")) == ([PLAIN], [DENSE])
    assert model.unit_counts("shared") == [SHARED] * 2
    attention = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert {*model.weights(PLAIN)} == attention | mlp < {*model.checkpoint.tensors}


def test_spaces_that_no_block_has_are_left_out(tmp_path: Path) -> None:
    every = save(tmp_path / "every", "qwen3_moe", **MIXED | {"mlp_only_layers": [], "head_dim": 4})
    assert "dense" not in open_model(every).family.spaces
    none = save(tmp_path / "none", "qwen3_moe", **MIXED | {"mlp_only_layers": [0, 1, 2], "head_dim": 4})
    assert {*open_model(none).family.spaces} == {"queries", "heads", "dense"}


@pytest.mark.parametrize(
    ("model_type", "job"),
    [
        ("qwen2_moe", {"recipe": "ridge", "ratio": 0.25}),
        ("qwen2_moe", {"recipe": "ridge", "target_params": "80%"}),
        ("qwen3_moe", {"recipe": "best", "ratio": 0.25, "container": "any"}),
        ("deepseek_v3", {"recipe": "ridge", "ratio": 0.25}),
        ("deepseek_v3", {"recipe": "best", "ratio": 0.25}),  # one key says how wide experts and shared ones are
        ("deepseek_v2", {"recipe": "best", "ratio": 0.25}),
        ("minicpm3", {"recipe": "best", "ratio": 0.5}),  # its class refuses heads that do not divide the hidden size
    ],
)
def test_it_is_estimated_sized_pruned_verified_and_reported(
    dense: dict[str, Path], tmp_path: Path, model_type: str, job: dict[str, Any]
) -> None:
    source = dense[model_type]
    given = {"text": source.parent / "calib.txt", "samples": 8, "window": CONTEXT, **job}
    given |= {"progress": False, "evaluate_samples": 0}
    estimate = ckpt_prune.prune(source, dry_run=True, **given).estimate
    assert estimate is not None
    assert estimate.peak_bytes > 0
    report = ckpt_prune.prune(source, output=tmp_path / "out", **given).report
    model = open_model(source)
    plain = model.blocks_with("dense")
    assert {site.block for site in report.sites if site.space == "dense"} == set(plain)
    assert {site.block for site in report.sites if site.space.startswith("mlp")} == {0, 1, 2} - set(plain)
    assert {site.block for site in report.sites if site.space == "heads"} == set(model.blocks_with("heads"))
    if "target_params" in job:
        assert report.after.parameters <= 0.8 * report.before.parameters
    checks = ckpt_prune.verify(tmp_path / "out", against=source).checks
    assert not [check for check in checks if check.passed is False]
    output = ckpt_prune.load(tmp_path / "out")
    assert output(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
    widths = [output.base_model.layers[block].mlp.down_proj.weight.shape[1] for block in plain]
    if "ratio" in job and job["recipe"] != "best":  # which chooses what goes by its effect
        assert widths == [DENSE * 3 // 4] * len(plain)


def test_a_map_over_blocks_of_both_kinds_is_refused(dense: dict[str, Path]) -> None:
    given = {"text": dense["qwen3_moe"].parent / "calib.txt", "samples": 8, "window": CONTEXT, "dry_run": True}
    with pytest.raises(UserError, match="what the mlp gives, and in a block of qwen3_moe it may be one mlp or experts"):
        ckpt_prune.prune(dense["qwen3_moe"], recipe="depth", progress=False, **given)


def test_a_mlp_in_place_of_experts_stays_whole_if_the_recipe_says_so(dense: dict[str, Path], tmp_path: Path) -> None:
    given = {"recipe": "magnitude", "ratio": 0.25, "overrides": ["spaces.dense={score: magnitude, ratio: 0}"]}
    ckpt_prune.prune(dense["qwen3_moe"], output=tmp_path / "out", progress=False, evaluate_samples=0, **given)
    before, after = (open_model(folder).read_block(PLAIN) for folder in (dense["qwen3_moe"], tmp_path / "out"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if ".mlp." in name)
