"""Rotations that are learned on what is masked before their block, against whole models."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ckpt_prune
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.rotation import learner as learning
from ckpt_prune.stages.rotation.descent import LearnedRotations
from ckpt_prune.stages.rotation.importance import Term
from tests import families
from tests.families import BLOCKS
from tests.pairs import dealt
from tests.stages.test_rotations import random_rotations
from tests.stages.whole import data_of, prune_by_mask, tensors_of

NORMS = {
    "llama-biases": ("input_layernorm", "post_attention_layernorm"),
    "llama-gqa-tied": ("input_layernorm", "post_attention_layernorm"),
    "opt": ("self_attn_layer_norm", "final_layer_norm"),
}
FIRST = {"opt": ("self_attn.q_proj", "fc1")}
LLAMA_FIRST = ("self_attn.q_proj", "mlp.gate_proj")


def in_turn(kind: str = "per-layer", method: str = "wanda", **rotation: Any) -> FullRecipe:
    values = {"kind": kind, "steps": 2, "measured": "pruned"} | rotation
    return FullRecipe.model_validate(
        {"version": 1, "name": "test", "ratio": 0.5, "target": "sequential"}
        | {"mask": {"method": method}, "rotation": values}
    )


@pytest.mark.parametrize(("variant", "method"), dealt(list(NORMS), ["wanda", "magnitude"]))
def test_inputs_are_those_behind_the_masked_blocks(dense, tmp_path, monkeypatch, variant, method):
    """Every block's inputs are those of the dense block on what the output's blocks before it give, turned back."""
    random_rotations(monkeypatch)
    by_hand, seen = learning.learn_rotations, []

    def watch_terms(terms: list[Term], *args: Any, **options: Any) -> LearnedRotations:
        seen.append({term.name: term.inputs for term in terms})
        return by_hand(terms, *args, **options)

    monkeypatch.setattr(learning, "learn_rotations", watch_terms)
    recipe = in_turn(method=method, importance="wanda")
    report = prune_by_mask(dense.folder(variant), tmp_path / "out", recipe, data_of(variant))
    assert report["calibration"]["target"] == "sequential"
    ids = data_of(variant).batch(slice(0, len(data_of(variant))))["input_ids"]
    ours = ckpt_prune.load(tmp_path / "out").double()
    theirs = families.stock(dense.folder(variant)).double()
    weights = tensors_of(dense.folder(variant))
    turned = load_file(tmp_path / "out" / ROTATIONS)
    with torch.inference_mode():
        streams = ours(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for block in range(BLOCKS):
        # The first block sees the dense embedding; between blocks the stream is in the basis of the one before.
        back = None if block == 0 else streams[block] @ turned[f"blocks.{block - 1}.residual"].double().T
        inputs = inputs_of(theirs, block, back, ids)
        for norm, first in zip(NORMS[variant], FIRST.get(variant, LLAMA_FIRST), strict=True):
            name = next(n for n in seen[block] if n.endswith(f"{first}.weight"))
            gain = weights[name.replace(f"{first}.weight", f"{norm}.weight")].double()
            shift = weights.get(name.replace(f"{first}.weight", f"{norm}.bias"), torch.zeros(1)).double()
            x = (inputs[first] - shift) / gain
            H = x.T @ x
            torch.testing.assert_close(seen[block][name].double(), H / H.diagonal().mean(), rtol=2e-3, atol=2e-4)


@torch.inference_mode()
def inputs_of(model: Any, block: int, states: Tensor | None, ids: Tensor) -> dict[str, Tensor]:
    """Return what the linears of a dense block read, (tokens, width), with its input replaced by `states` if given."""
    layers = model.get_decoder().layers
    inputs: dict[str, Tensor] = {}
    hooks = []
    for path, module in layers[block].named_modules():
        if isinstance(module, torch.nn.Linear):
            keep = lambda _, args, path=path: inputs.__setitem__(path, args[0].reshape(-1, args[0].shape[-1]))  # noqa: E731
            hooks.append(module.register_forward_pre_hook(keep))
    if states is not None:
        hooks.append(layers[block].register_forward_pre_hook(lambda _, args: (states, *args[1:])))
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs


def test_what_is_masked_before_shows(dense, tmp_path):
    """The first block learns what it did on the dense model, the others something else."""
    folder, data = dense.folder("llama"), data_of("llama")
    pruned, cached = in_turn(), in_turn(measured="dense")
    one = prune_by_mask(folder, tmp_path / "one", pruned, data)["rotation"]["learned"]
    two = prune_by_mask(folder, tmp_path / "two", cached, data)["rotation"]["learned"]
    assert one[0]["entropy_before"] == pytest.approx(two[0]["entropy_before"], rel=1e-6)
    for ours, theirs in zip(one[1:], two[1:], strict=True):
        assert ours["entropy_before"] != pytest.approx(theirs["entropy_before"], rel=1e-6)
