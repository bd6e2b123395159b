"""Blocks with different spaces: a Qwen2-MoE whose middle block has one mlp in place of experts.

The description of the family refuses such a model. Here it is lifted, and the model says which spaces a block has.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers

import ckpt_prune
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import AnySpace, SpaceName
from tests.evaluation.tiny import tiny_tokenizer
from tests.families import CONTEXT, SIZES

PLAIN = 1
"""The block with one mlp."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
SHARED = 24


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "dense"
    config = transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=SHARED, mlp_only_layers=[PLAIN], head_dim=4
    )
    torch.manual_seed(0)
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder.parent / "calib.txt").write_text("the cat sat on the mat " * 200)
    return folder


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = Model.spaces

    def of_block(model: Model, block: int) -> Mapping[SpaceName, AnySpace]:
        own = spaces(model, block)
        return {name: own[name] for name in ("queries", "heads")} if block == PLAIN else own

    monkeypatch.setattr(Model, "spaces", of_block)
    monkeypatch.setattr(Family, "check_config", lambda *_: None)


def test_every_block_is_asked(dense: Path) -> None:
    model = open_model(dense)
    assert (model.blocks_with("heads"), model.blocks_with("shared")) == ([0, 1, 2], [0, 2])
    assert model.unit_counts("shared") == [SHARED] * 2
    attention = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"}
    assert {*model.weights(PLAIN)} == attention < {*model.checkpoint.tensors}


@pytest.mark.parametrize(
    "job",
    [
        {"recipe": "ridge", "ratio": 0.25},
        {"recipe": "ridge", "target_params": "80%"},
        {"recipe": "best", "ratio": 0.25, "container": "any"},
    ],
)
def test_it_is_estimated_sized_pruned_and_reported(dense: Path, tmp_path: Path, job: dict[str, object]) -> None:
    given = {"text": dense.parent / "calib.txt", "samples": 8, "window": CONTEXT, **job}
    given |= {"progress": False, "evaluate_samples": 0}
    estimate = ckpt_prune.prune(dense, dry_run=True, **given).estimate
    assert estimate is not None
    assert estimate.peak_bytes > 0
    result = ckpt_prune.prune(dense, output=tmp_path / "out", **given)
    report = result.report
    assert {site.block for site in report.sites if site.space == "mlp"} == {0, 2}
    assert {site.block for site in report.sites if site.space == "heads"} == {0, 1, 2}
    if "target_params" in job:
        assert report.after.parameters <= 0.8 * report.before.parameters
    output = ckpt_prune.load(tmp_path / "out")
    assert output(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
    before = open_model(dense).read_block(PLAIN)
    after = open_model(tmp_path / "out").read_block(PLAIN)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if ".mlp." in name)
