"""Dimensions of the residual stream that go, in every family whose stream is described.

A stream that lies in fewer dimensions than the model has loses none of them: the outputs stay. One that does not is
projected, as the dense stock model is by hand (`tests/oracles/slicing.py`).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import ckpt_prune
from ckpt_prune.job.prepared import begin
from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.model.sublayers import list_sublayers
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.hidden.bases import SlicedStream, directions_keeping_ones, stream_scale
from ckpt_prune.stages.hidden.preview import hidden_record, narrow_jointly, view_of
from ckpt_prune.stages.rotation.absorbing import residual_of
from ckpt_prune.stages.rotation.moments import stream_gram
from ckpt_prune.stages.shared.moments import open_moments
from ckpt_prune.verification.verify import verify
from tests import refusals
from tests.oracles.slicing import Projected
from tests.pairs import choose_cases, dealt

from .dense import Dense
from .models import FIRST, Case
from .whole import assert_same_outputs, outputs, plain

KEPT, COMPUTED = 2e-5, 2e-3


def hidden_recipe(kind: str, ratio: float, **more: Any) -> FullRecipe:
    target = "sequential" if kind == "per-block" else "dense"
    hidden = {"kind": kind, "multiple_of": 2, **more}
    return FullRecipe.model_validate({"version": 1, "name": "test", "ratio": ratio, "target": target, "hidden": hidden})


HEADS = {"falcon", "gpt2", "gpt_neox", "mpt", "opt"}
"""Families whose stock classes make heads as wide together as the stream is."""
SLOTLESS = {"gptj", "stablelm"}
"""Those without a slot for biases that their norms leave behind."""
KINDS = ["per-block", "shared"]


def refusal(case: Case, kind: str, *, sliced: bool = True) -> str | None:
    """How the reason begins for which a family is not sliced."""
    residual = case.family.residual
    if residual is None or (kind == "shared" and case.family.head is None):
        return f"{case.model_type} keeps all dimensions of its residual stream"
    if kind == "per-block" and residual.projections:
        return f"{case.model_type} keeps all dimensions of its residual stream"
    if kind == "shared" and sliced and case.model_type in HEADS:
        return f"the heads of {case.model_type} are always as wide together as the hidden size"
    return "no stock class fits: " if kind == "shared" and case.model_type in SLOTLESS else None


SHARED = [case for case in FIRST if refusal(case, "shared") is None]
WHOLE = {"llama", "opt", "mistral", "qwen2", "vit", "deit"}
PROJECTED = {"llama", "opt", "gpt2", "cohere2", "granite", "gemma", "vit", "deit"}
"""RMSNorms and LayerNorms with and without biases, Conv1D, attention beside the mlp, multipliers, offsets of gains,
streams that begin in a convolution."""
SLICED = [
    (case, kind)
    for case in FIRST
    for kind in [kind for kind in KINDS if refusal(case, kind) is None][: None if case.model_type in PROJECTED else 1]
]
"""Those of both kinds, all others of the first that they can."""
UNCHANGED = dealt([case for case in FIRST if case.model_type in WHOLE or refusal(case, "shared", sliced=False)], KINDS)


@pytest.mark.parametrize(("case", "kind"), UNCHANGED, ids=str)
def test_nothing_sliced_keeps_the_outputs(dense: Dense, case: Case, kind: str, tmp_path) -> None:
    out, request = tmp_path / "out", dense.request(case, hidden_recipe(kind, 0.0), case.samples())
    reason = refusal(case, kind, sliced=False)
    if reason is not None:
        assert refusals.refusal(prepare_plan, request).startswith(reason)
        return
    report = run_job(request, out).report
    assert report.hidden is not None
    assert report.hidden.kept == report.hidden.dimensions
    assert report.container.remote_code is (kind == "per-block")
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(case.model(), other), KEPT)
    assert all(check.passed is not False for check in verify(out, dense.folder(case)))


@pytest.mark.parametrize(("case", "kind"), choose_cases(SLICED, lambda pair: pair[0].model_type in PROJECTED), ids=str)
def test_equals_the_dense_model_whose_stream_is_projected_by_hand(
    dense: Dense, case: Case, kind: str, tmp_path
) -> None:
    out, data = tmp_path / "out", case.samples()
    report = run_job(dense.request(case, hidden_recipe(kind, 0.4), data), out).report
    assert report.hidden is not None
    model = Model.open(dense.folder(case))
    by_hand = Projected(plain(case.model()).double(), case, list_sublayers(model), report.hidden.kept)
    by_hand.by_block(data) if kind == "per-block" else by_hand.shared(data)
    other = case.samples(4, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(by_hand.model, other), COMPUTED)
    assert torch.allclose(torch.tensor(report.hidden.energy), torch.tensor(by_hand.energy), atol=1e-4)
    kept_check = {check.name: check for check in verify(out, dense.folder(case))}["kept units"]
    assert kept_check.passed is True, kept_check.detail


@pytest.mark.parametrize("case", [case for case in SHARED if case.model_type in {"gemma", "vit"}], ids=str)
def test_with_blocks_it_is_two_prunes_one_after_the_other(dense: Dense, case: Case, tmp_path) -> None:
    """The map of a gap is absorbed, then the basis of what is left: the same bytes."""
    parts: dict[str, Any] = {
        "depth": {"drop": 1, "compensation": {"method": "linear"}},
        "hidden": {"kind": "shared", "multiple_of": 2, "drop": 4},
    }
    folders, data = {}, case.samples()
    for name, fields in (
        ("both", parts),
        ("depth", {"depth": parts["depth"]}),
        ("hidden", {"hidden": parts["hidden"]}),
    ):
        recipe = FullRecipe.model_validate({"version": 1, "name": "test", **fields})
        request = dense.request(case, recipe, data)
        folders[name] = tmp_path / name
        if name == "hidden":
            request = replace(request, model=Model.open(folders["depth"]))
        run_job(request, folders[name])
    ours, theirs = (
        [(path.name, path.read_bytes()) for path in sorted(folders[name].glob("*.safetensors"))]
        for name in ("both", "hidden")
    )
    assert ours == theirs
    assert all(check.passed is not False for check in verify(folders["both"], dense.folder(case)))


@pytest.mark.parametrize("case", [case for case in FIRST if case.model_type in {"llama", "opt", "gemma"}], ids=str)
def test_statistics_tell_what_norms_give(dense: Dense, case: Case) -> None:
    """Gains, their offsets and biases taken out again: the Grams of a live stream, without the final norm's."""
    model = dense.model(case)
    total = stream_gram(model, CachedMoments(dense.statistics(case), model))
    stream = open_stream(model, case.samples(), device=torch.device("cpu"), compute_dtype=torch.float32)
    live, grams = (
        SlicedStream(stream, list_sublayers(model), normed=True, centred=residual_of(model.family).norm == "layer"),
        list[torch.Tensor](),
    )
    for block in range(model.blocks):
        live.block(block, model.read_block(block), lambda _place, gram: grams.append(gram))
    expected = torch.stack(grams).sum(0)
    assert torch.allclose(total.double(), expected, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("case", [case for case in SHARED if case.model_type in {"llama", "cohere2"}], ids=str)
def test_drift_beside_a_narrower_stream_is_from_the_dense_one(dense: Dense, case: Case) -> None:
    """In any basis: c (h - mean) P of the dense model less z of stock transformers, behind the first block's attention.

    Where attention and mlp read the same stream that is behind its heads alone.
    """
    values = {"hidden": {"kind": "shared", "drop": 4, "multiple_of": 2}, "target": "drift", "container": "any"}
    spaces = {"heads": {"score": "rcpu", "compensation": {"method": "ridge"}}}
    recipe = FullRecipe.model_validate({"version": 1, "name": "test", "spaces": spaces, **values})
    request = begin(dense.request(case, recipe, case.samples()))
    model, kept = request.model, request.model.dimension("hidden") - 4
    vectors = torch.randn(model.dimension("hidden"), 3 * kept, dtype=torch.float64)
    layer = residual_of(model.family).norm == "layer"
    basis = directions_keeping_ones(vectors @ vectors.T, kept)[0] if layer else torch.linalg.qr(vectors[:, :kept])[0]
    view = view_of(request, kept, lambda _block: (basis, basis))
    narrow = narrow_jointly(request, hidden_record(request, kept), view)
    source = open_moments(narrow, {"heads": True})
    (space,) = source.group_keys(["heads"])
    tensors = narrow.model.read_block(0)
    folds = source.moments(0, tensors, space)["heads"]
    drift = sum_folds([fold for fold in folds if isinstance(fold, Moments)]).drift
    assert drift is not None
    config = parse_config(narrow.model.checkpoint.config)
    short = type(case.model())(config)
    narrow_tensors = narrow.model.checkpoint.read(list(narrow.model.checkpoint.tensors))
    short.load_state_dict(narrow_tensors, strict=False)
    ids = case.samples().batch(slice(len(case.samples())))["input_ids"]
    seen = [_behind_attention(network.double().eval(), model, ids) for network in (plain(case.model()), short)]
    wide = seen[0] - seen[0].mean(-1, keepdim=True) if layer else seen[0]
    delta = (stream_scale(kept, model.dimension("hidden")) * wide @ basis - seen[1]).flatten(0, 1)
    assert drift.energy == pytest.approx(float(delta.square().sum()), rel=1e-4)
    assert torch.allclose(drift.sum, delta.sum(0), atol=1e-4 * float(delta.abs().sum()))


@torch.no_grad()
def _behind_attention(network: Any, model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Add up what enters the first block and what its attention adds."""
    block, states = network.get_submodule(model.family.layers)[0], dict[str, torch.Tensor]()
    block.register_forward_pre_hook(
        lambda _, args, kwargs: states.update(h=(*args, *kwargs.values())[0]), with_kwargs=True
    )
    output = block.get_submodule(model.family.attention.output)
    output.register_forward_hook(lambda _, args, given: states.update(a=given))
    network(input_ids=ids, use_cache=False)
    return states["h"] + states["a"]
