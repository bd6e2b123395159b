"""Which tensors of a block are trained, and which of their elements."""

import pytest
import torch

from ckpt_prune.stages.recovery.block_training import surviving_weights, trainable_tensors
from tests.encoders import VARIANTS as ENCODERS
from tests.families import VARIANTS as FAMILIES
from tests.oracles import laco
from tests.pairs import one_of

from .twins import BLOCKS, settings

NEVER = ("norm", "rotation", "layer_scale", "embed", "lambda")


@pytest.mark.parametrize("variant", one_of(4, [*FAMILIES, *ENCODERS]))
def test_all_linears_of_a_block_and_nothing_else(twins, variant):
    """By the paths that the oracle knows linears by; either half alone, and both together."""
    pair = twins(variant)
    model = pair.dense()
    for block in range(BLOCKS):
        expected = set(laco.parameters(model, block))
        names = pair.names(block, settings())
        assert set(names) == expected
        assert len(names) == len(set(names))
        assert not any(word in name.lower() for name in names for word in NEVER)
        mlp, attention = (pair.names(block, settings(only=only)) for only in ("mlp", "attention"))
        assert sorted([*mlp, *attention]) == sorted(names)
        norms = set(pair.names(block, settings(norms=True))) - set(names)
        assert norms == {name for name in pair.model.block_names(block) if "norm" in name.lower() or "scale" in name}
        shapes = {name: tuple(tensor.shape) for name, tensor in pair.block(block, pair.disk()).items()}
        # Attention is square here but for heads of another width; an MLP is not.
        assert {shapes[name] for name in mlp if name.endswith("weight")}.isdisjoint(
            shapes[name] for name in attention if name.endswith("weight")
        )


def test_names_of_a_llama_block(twins):
    family = twins("llama").family
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    tensors = [f"model.layers.7.{module}.weight" for module in [*modules, "mlp.gate_proj", "input_layernorm"]]
    opened = "model.layers.7.self_attn.o_proj.bias"
    present = dict.fromkeys([*tensors, opened], torch.ones(2))
    assert trainable_tensors(family, 7, present) == [*tensors[:4], opened, tensors[4]]
    assert trainable_tensors(family, 7, present, "mlp") == [tensors[4]]
    assert trainable_tensors(family, 7, present, "attention") == [*tensors[:4], opened]
    assert trainable_tensors(family, 6, present) == []
    present["model.layers.7.widths"] = torch.tensor([2, 3])
    assert trainable_tensors(family, 7, present, "mlp", norms=True) == [tensors[4], tensors[5]]


def test_elements_that_are_free_worked_out_by_hand():
    weight = torch.tensor([[0.0, -0.0, 0.0], [1.0, 0.0, -0.0], [0.0, 0.0, 0.0], [-2.0, 1e-45, torch.nan]])
    tensors = {"a.weight": weight, "a.bias": torch.tensor([0.0, 0.0, 0.5, -0.0]), "b.bias": torch.ones(2)}
    assert surviving_weights(tensors, "a.weight").tolist() == [
        [False] * 3,
        [True, False, False],
        [False] * 3,
        [True] * 3,
    ]
    # A dropped unit of a padded container; an empty slot; what a unit without inputs is left with; an empty slot.
    assert surviving_weights(tensors, "a.bias").tolist() == [False, True, True, True]
