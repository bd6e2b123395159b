"""How many tokens a model reads: RoBERTa has positions that none of them has."""

from pathlib import Path

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.context import context_length, reserved_positions
from ckpt_prune.runner.checks import check_spaces
from ckpt_prune.stages import FullRecipe
from tests.contract.dense import Dense, spaces_recipe
from tests.contract.models import Case
from tests.families import model_of
from tests.refusals import refusal


@pytest.mark.parametrize(
    ("model_type", "positions", "reserved"),
    [("roberta", 514, 2), ("xlm-roberta", 514, 2), ("mpnet", 514, 2), ("bert", 512, 0), ("modernbert", 8192, 0)],
)
def test_positions_behind_that_of_the_padding_token(model_type: str, positions: int, reserved: int) -> None:
    config = model_of({"model_type": model_type, "max_position_embeddings": positions}).config
    assert reserved_positions(config) == reserved
    assert context_length(config) == positions - reserved
    assert model_of({"model_type": model_type, "max_position_embeddings": positions}).tokens == min(
        2048, positions - reserved
    )


def test_a_roberta_reads_as_many_tokens_as_said_and_no_more(tmp_path: Path) -> None:
    """The table has two more rows than that."""
    case = Case("roberta", "RobertaModel")
    model, most = case.model(), context_length(case.config)
    assert most == 30
    ids = torch.full((1, 31), 5)
    assert model(input_ids=ids[:, :most]).last_hidden_state.shape[1] == most
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(input_ids=ids)
    assert Dense(tmp_path).model(case).tokens == most


def test_what_a_family_has_not_is_refused_with_what_it_has() -> None:
    recipe = {"version": 1, "name": "test", "ratio": 0.5, "spaces": {"experts": {"score": "reap"}}}
    assert refusal(check_spaces, Case("llama", "LlamaForCausalLM").family, FullRecipe.model_validate(recipe)) == (
        "recipe test prunes experts, which llama has not: it has rotary, queries, heads, values, mlp"
    )


@pytest.mark.parametrize(
    ("model_type", "architecture", "why"),
    [
        ("deberta-v2", "DebertaV2Model", "queries and keys also meet embeddings of relative positions, which go"),
        ("mpnet", "MPNetModel", "its logits have a bias of relative positions besides"),
    ],
)
def test_queries_and_keys_that_stay_are_refused_with_the_reason(model_type: str, architecture: str, why: str) -> None:
    bert = Case("bert", "BertModel")
    with pytest.raises(UserError, match=r"^recipe test prunes qk, which ") as caught:
        check_spaces(Case(model_type, architecture).family, spaces_recipe(bert, {"qk": "none"}))
    assert str(caught.value).startswith(f"recipe test prunes qk, which {model_type} has not ({why}")
    assert str(caught.value).endswith("it has heads, mlp")
