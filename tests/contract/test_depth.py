"""Whole blocks that go, in every family, against the dense stock model with its list of blocks edited by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

import ckpt_prune
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.depth import PER_BLOCK
from ckpt_prune.model.spaces import ConsumerSpace
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.depth.preview import find_map_spaces
from ckpt_prune.verification.verify import verify
from tests.oracles.gap import ridge_map
from tests.pairs import choose_cases
from tests.refusals import refusal

from .dense import Dense
from .models import ALIKE, FIRST, Case, unlike_cases
from .open_experts import open_up, paths_of
from .whole import assert_same_outputs, outputs, plain, record_states

KEPT, COMPUTED = 1e-5, 5e-4
STRENGTH = 0.05
PATTERNS: dict[str, list[Any]] = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "no_rope_layers": [1, 0, 0, 1],
}
"""What differs from block to block, in another rhythm than any class makes of four blocks, or of three."""


def deep(case: Case) -> Case:
    """The case with four blocks."""
    config = AutoConfig.for_model(case.model_type)
    patterns = {key: value for key, value in PATTERNS.items() if getattr(config, key, None)}
    if case.described.sliding_window is not None:
        patterns.pop("layer_types", None)
    return replace(case, blocks=4, settings=json.dumps(patterns))


def depth_recipe(blocks: list[int], **compensation: Any) -> FullRecipe:
    values = {"version": 1, "name": "test", "depth": {"blocks": blocks, "compensation": compensation}}
    return FullRecipe.model_validate(values)


def without(case: Case, blocks: list[int]) -> PreTrainedModel:
    """The dense stock model without some of its blocks."""
    model = plain(case.model()).double()
    layers: Any = model.get_submodule(case.family.layers)
    kept = [block for block in range(len(layers)) if block not in blocks]
    for config in {
        id(part_config): part_config
        for part_config in (model.config, *(m.config for m in model.modules() if hasattr(m, "config")))
    }.values():
        for key in PER_BLOCK:
            per_block = getattr(config, key, None)
            if per_block is not None and len(per_block) == len(layers):
                setattr(config, key, [per_block[block] for block in kept])
        setattr(config, case.family.dimensions["layers"][0], len(kept))
    owner, _, name = case.family.layers.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.ModuleList([layers[block] for block in kept]))
    return model


@pytest.mark.parametrize("case", choose_cases(FIRST, unlike_cases()[::2].__contains__), ids=str)
def test_equals_the_dense_model_with_its_list_of_blocks_edited(dense: Dense, case: Case, tmp_path) -> None:
    case, out = deep(case), tmp_path / "out"
    report = run_job(dense.request(case, depth_recipe([1, 2])), out).report
    assert report.depth is not None
    assert (report.depth.kept, report.container.remote_code) == ([0, 3], False)
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(without(case, [1, 2]), other), KEPT)
    if case.model_type in ALIKE:
        return
    checks = verify(out, dense.folder(case))
    assert [(check.name, check.passed) for check in checks if check.passed is not True] == [("sparsity", None)]


class Mapped:
    """The map in block 0 for block 1 that goes, on activations of the whole dense model."""

    def __init__(self, case: Case, data: Samples) -> None:
        model, family = plain(case.model()).double(), case.family
        space: ConsumerSpace = family.consumers[find_map_spaces(family)[0]]
        block = f"{family.layers}.0"
        # What experts give together is what the module gives that holds them.
        path = path_of(case, 0, space.consumer) if family.experts is None else f"{block}.{family.experts.module}"
        self.path, layers = path, [block, f"{family.layers}.1"]
        norms = [
            f"{block}.{name}"
            for name, module in model.get_submodule(block).named_modules()
            if isinstance(module, nn.LayerNorm)
        ]
        states = record_states(model, data, inputs=norms, results=[path, *layers, *norms])
        linear: Any = model.get_submodule(path)
        bias = getattr(linear, "bias", None)
        old = 0 if bias is None else bias.detach().numpy()
        self.old = old
        given, stream, reached = (_rows(states[name]) for name in (path, *layers))
        lacking = reached - stream
        config = model.config
        if space.multiplier is not None:
            lacking = lacking / getattr(config, space.multiplier)
        if space.scale is not None:
            lacking = lacking / model.get_parameter(f"{block}.{space.scale}").detach().numpy()
        if space.norm is not None:
            gain = model.get_submodule(block).get_submodule(space.norm).weight.detach().numpy() + family.norm_offset
            lacking = lacking / gain * torch.tensor(given).square().mean(1, keepdim=True).sqrt().numpy()
        for name in norms:
            if (_rows(states[name]) == stream).all():  # the whole sum passes it
                norm: Any = model.get_submodule(name)
                entered = _inputs(model, data, name)
                lacking = lacking / norm.weight.detach().numpy() * (entered.var(1, keepdims=True) + norm.eps) ** 0.5
        self.biased = bias is not None
        z = given - old
        self.map, self.bias = ridge_map(z, z + lacking, STRENGTH, biased=self.biased)

    def put_between(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model with the map behind the projection."""
        T, b = torch.tensor(self.map), torch.tensor(self.bias + self.old)

        def apply_map(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            return (output - torch.tensor(self.old)) @ T.T + b

        model.get_submodule(self.path).register_forward_hook(apply_map)
        return model


def _rows(values: Any) -> Any:
    return values.reshape(-1, values.shape[-1])


def _inputs(model: nn.Module, data: Samples, path: str) -> Any:
    return _rows(record_states(model, data, inputs=[path])[path])


def path_of(case: Case, block: int, module: str) -> str:
    """Path of a linear module of a block in a model whose experts are open."""
    (path,) = paths_of(case.family)[module]
    return f"{case.family.layers}.{block}.{path}"


@pytest.mark.parametrize("case", [c for c in unlike_cases() if find_map_spaces(c.family)][::4], ids=str)
def test_a_map_equals_the_same_put_between_by_hand(dense: Dense, case: Case, tmp_path) -> None:
    case, out, data = deep(case), tmp_path / "out", case.samples()
    recipe = depth_recipe([1], method="linear", **{"lambda": STRENGTH})
    report = run_job(dense.request(case, recipe, data), out).report
    assert report.depth is not None
    mapped = Mapped(case, data)
    (gap,) = report.depth.gaps
    assert gap.method == ("affine" if mapped.biased else "ridge")
    other = case.samples(4, seed=9)
    expected = outputs(mapped.put_between(without(case, [1])), other)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), expected, COMPUTED)
    assert all(check.passed is not False for check in verify(out, dense.folder(case)))


@pytest.mark.parametrize("case", unlike_cases()[::6], ids=str)
def test_a_part_that_is_gone_gives_nothing_to_the_stream(dense: Dense, case: Case, tmp_path) -> None:
    case, other = deep(case), deep(case).samples(4, seed=9)
    for block, part in ((1, "attention"), (2, "mlp")):
        out = tmp_path / part
        depth = {"blocks": [block], "part": part}
        recipe = FullRecipe.model_validate({"version": 1, "name": "test", "depth": depth})
        report = run_job(dense.request(case, recipe), out).report
        assert report.before == report.after
        model = plain(case.model()).double()
        open_up(model, case.family)
        consumers = {space.consumer for space in case.family.consumers.values()}
        for module in consumers:
            if (module == case.family.attention.output) == (part == "attention"):
                model.get_submodule(path_of(case, block, module)).register_forward_hook(
                    lambda _, args, output: torch.zeros_like(output)
                )
        assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(model, other), KEPT)
        assert all(check.passed is not False for check in verify(out, dense.folder(case)))


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_block_without_attention_computes_what_one_with_zeros_does(dense: Dense, case: Case, tmp_path) -> None:
    case, other = deep(case), deep(case).samples(4, seed=9)
    values = {"version": 1, "name": "test", "depth": {"blocks": [0, 2], "part": "attention"}}
    bare = FullRecipe.model_validate(values | {"container": "remote"})
    if case.family.residual is None or case.family.attention.latent:
        with pytest.raises(UserError, match=rf"^remote code cannot leave out the attention of a {case.model_type}:"):
            prepare_plan(dense.request(case, bare))
        return
    report = run_job(dense.request(case, bare), tmp_path / "bare").report
    run_job(dense.request(case, FullRecipe.model_validate(values)), tmp_path / "zeros")
    assert report.container.remote_code
    assert report.after.parameters < report.before.parameters
    assert report.after.flops < report.before.flops
    tensors = Checkpoint.open(tmp_path / "bare").tensors
    attention = case.family.attention
    assert case.family.tensor(1, attention.output) in tensors
    for module in {attention.query, attention.key, attention.value, attention.output}:
        assert not {case.family.tensor(block, module) for block in (0, 2)} & tensors.keys()
    found = outputs(ckpt_prune.load(tmp_path / "bare"), other)
    assert_same_outputs(found, outputs(ckpt_prune.load(tmp_path / "zeros"), other), KEPT)
    assert all(check.passed is not False for check in verify(tmp_path / "bare", dense.folder(case)))


def test_experts_beside_one_that_all_tokens_share_take_no_map(dense: Dense) -> None:
    case = deep(next(case for case in FIRST if not find_map_spaces(case.family)))
    assert refusal(prepare_plan, dense.request(case, depth_recipe([1], method="linear"), case.samples())) == (
        f"recipe test maps what the mlp gives, and in a block of {case.model_type} experts that all tokens share add "
        "to it: say --set depth.compensation.method=none"
    )


def test_a_block_that_the_class_would_build_otherwise_is_not_moved(dense: Dense) -> None:
    case = deep(next(case for case in FIRST if case.model_type == "modernbert"))
    assert refusal(prepare_plan, dense.request(case, depth_recipe([0]))) == (
        "block 1 would be block 0, and the class of modernbert builds that one otherwise (attn_norm LayerNorm there, "
        "attn_norm Identity here): keep the blocks before it, or drop others"
    )
