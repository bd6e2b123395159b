"""Rotated models: the dense function with random rotations, what is masked afterwards, and what is learned.

Random rotations stand in for learned ones where a test is about folding: those of a short training are near the
identity and would hide a transposed matrix.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import ckpt_prune
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.model.containers.rope_keys import state_rope
from ckpt_prune.runner.run_job import preview_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.rotation import learner as rotations
from ckpt_prune.stages.rotation.descent import LearnedRotations, RotationProblem
from ckpt_prune.stages.rotation.run import learner_of
from ckpt_prune.stages.shared.moments import open_moments
from tests import encoders, families, refusals
from tests.families import BLOCKS, prune, windows
from tests.oracles import rotation_entropy
from tests.oracles.rotation_entropy import full_rotation
from tests.pairs import dealt, one_of
from tests.stages.whole import (
    RULES,
    TARGETS,
    assert_masked,
    data_of,
    prune_by_mask,
    tensors_of,
    whole,
)
from tests.stored import Sources

KINDS = ["shared", "per-layer", "values"]
OPT = ["opt", "opt-no-bias", "opt-tied", "opt-no-prefix"]
VARIANTS = [*families.VARIANTS, *OPT]
TIED = ["llama-gqa-tied", "qwen2", "opt-tied", "opt-no-prefix"]
TEXT = windows(3, 20, seed=9)
CELLS = one_of(4, dealt(VARIANTS, KINDS, 2))
"""Two kinds of every variant; what is rotated serves several tests. `tests/contract` has every family in every kind."""


# ---- rotations at random -----------------------------------------------------------------------------------------


def random_rotations(patch: pytest.MonkeyPatch, seed: int = 3) -> None:
    """Learn nothing: hand out random rotations, the same ones for the same sizes in the same order."""
    generator = torch.Generator().manual_seed(seed)

    def orthogonal(*shape: int) -> Tensor:
        return torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64))[0]

    def stream(hidden: int | None, preserve: Tensor | None) -> Tensor | None:
        """R1, which leaves `preserve` where it is."""
        if hidden is None:
            return None
        if preserve is None:
            return orthogonal(hidden, hidden)
        basis = torch.randn(hidden, hidden, generator=generator, dtype=torch.float64)
        basis[:, 0] = preserve
        complement = torch.linalg.qr(basis)[0][:, 1:]
        return torch.outer(preserve, preserve) + complement @ orthogonal(hidden - 1, hidden - 1) @ complement.T

    def learn(_terms: Any, problem: RotationProblem, *_: Any) -> LearnedRotations:
        heads = orthogonal(*problem.shapes(1)[1][1:])
        return LearnedRotations(stream(problem.hidden, problem.preserve), heads, 2.0, 1.0, 3, [])

    def learn_shared(blocks: int, _terms_of: Any, problem: RotationProblem, *_: Any) -> LearnedRotations:
        heads = orthogonal(*problem.shapes(blocks)[1])
        return LearnedRotations(stream(problem.hidden, problem.preserve), heads, 2.0, 1.0, 3, [])

    patch.setattr(rotations, "learn_rotations", learn)
    patch.setattr(rotations, "learn_shared_rotation", learn_shared)


def rotating(kind: str, mask: dict[str, Any] | None = None, **more: Any) -> FullRecipe:
    """Rotate, and zero nothing unless told to."""
    values = {"version": 1, "name": "test", "ratio": 0.0, "mask": mask or {"method": "magnitude"}}
    return FullRecipe.model_validate(values | {"rotation": {"kind": kind, "steps": 2}} | more)


@pytest.fixture(scope="module")
def turned(dense, tmp_path_factory) -> Callable[..., Path]:
    """Variant and kind → the output with random rotations and nothing masked, made once."""
    root = tmp_path_factory.mktemp("turned")

    def make(variant: str, kind: str, **source: Any) -> Path:
        out = root / f"{variant}-{kind}-{'-'.join(map(str, source.values()))}"
        if not out.exists():
            with pytest.MonkeyPatch.context() as patch:
                random_rotations(patch)
                prune(encoders.job_on(dense.folder(variant, **source), rotating(kind)), out)
        return out

    return make


def load_rotated(folder: Path, kind: str) -> PreTrainedModel:
    """By stock transformers unless blocks turn the stream."""
    return ckpt_prune.load(folder) if kind == "per-layer" else families.stock(folder)


@torch.inference_mode()
def logits(model: PreTrainedModel, ids: Tensor = TEXT) -> Tensor:
    return model.double()(input_ids=ids, use_cache=False).logits


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


# ---- the same function -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["opt-model", "opt-350m-like"])
def test_values_alone_rotate_in_any_residual_stream(dense, turned, variant):
    """Without a head, after a norm, beside projections: R2 does not meet the stream."""
    data = data_of(variant)
    ours, theirs = (encoders.stock(folder, variant) for folder in (turned(variant, "values"), dense.folder(variant)))
    encoders.assert_same_outputs(ours.double(), theirs.double(), data, tolerance=1e-5)


# ---- what became of the tensors ----------------------------------------------------------------------------------


def is_opt(variant: str) -> bool:
    return variant.startswith("opt")


def absorbs_ends(variant: str, kind: str) -> bool:
    """Whether embedding, final norm and head take part."""
    return kind == "shared" or (kind == "per-layer" and not is_opt(variant) and variant not in TIED)


@pytest.mark.parametrize(("variant", "kind"), CELLS)
def test_every_linear_that_a_rotation_meets_is_turned_and_no_other(dense, turned, variant, kind):
    before, after = tensors_of(dense.folder(variant)), tensors_of(turned(variant, kind))
    untouched = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    modules = ("proj.weight", "fc1.weight", "fc2.weight")
    linears = {name for name in before if "layers." in name and name.endswith(modules)}
    met = {name for name in linears if kind != "values" or any(m in name for m in ("v_proj", "o_proj", "out_proj"))}
    assert len(linears) == BLOCKS * (6 if is_opt(variant) else 7)
    assert untouched & linears == linears - met
    ends = {name for name in before if "embed" in name or "lm_head" in name}
    assert ends
    assert untouched & ends == (set() if absorbs_ends(variant, kind) else ends)


@pytest.mark.parametrize(("variant", "kind"), CELLS)
def test_heads_and_configs(dense, turned, variant, kind):
    """One R1 unties a tied head; modules that turn the stream stand where the config says, in remote code."""
    out = turned(variant, kind)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (dense.folder(variant), out))
    names, added = tensors_of(dense.folder(variant)), tensors_of(out).keys()
    added = added - names.keys()
    entries, exits = ({n for n in added if f".{side}_rotation.weight" in n} for side in ("entry", "exit"))
    biases = {name for name in added if name.endswith(".bias")}
    if kind == "shared" and variant in TIED:
        assert after.pop("tie_word_embeddings") is False
        before.pop("tie_word_embeddings", None)
        assert added - biases == {"lm_head.weight"}
    else:
        assert added - biases == entries | exits
    # A norm's bias goes into linears, which get one where they have none.
    assert bool(biases) == (variant == "opt-no-bias" and kind != "values")
    assert ("auto_map" in after) == (kind == "per-layer")
    turns = after.get("ckpt_prune_rotations")
    if kind != "per-layer":
        assert (turns, entries, exits) == (None, set(), set())
        if not biases:
            assert after == state_rope(before)
        return
    first = 1 if absorbs_ends(variant, kind) else 0
    last = [] if absorbs_ends(variant, kind) else [BLOCKS - 1]
    assert turns == {"entry": list(range(first, BLOCKS)), "exit": last}
    assert (len(entries), len(exits)) == (BLOCKS - first, len(last))


@pytest.mark.parametrize(("variant", "kind"), dealt(["llama-gqa-tied", "qwen3", "mistral", "opt"], KINDS))
def test_rotations_are_kept_beside_the_model(dense, turned, variant, kind):
    out = turned(variant, kind)
    stored = load_file(out / ROTATIONS)
    config = json.loads((out / "config.json").read_text())
    kv_heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    streams = {"shared": ["residual"], "per-layer": [f"blocks.{b}.residual" for b in range(BLOCKS)], "values": []}[kind]
    heads = [f"blocks.{b}.heads" for b in range(BLOCKS)]
    assert stored.keys() == {*streams, *heads}
    assert all(stored[name].shape == (16, 16) for name in streams)
    assert all(stored[name].shape == (kv_heads, head_dim, head_dim) for name in heads)
    for name, tensor in stored.items():
        assert tensor.dtype == torch.float32
        wide = tensor.double()
        identity = torch.eye(wide.shape[-1], dtype=torch.float64).expand_as(wide)
        torch.testing.assert_close(wide.mT @ wide, identity, rtol=0, atol=1e-6)
        assert not torch.allclose(wide, identity, atol=0.1), name
    if is_opt(variant):
        ones = torch.ones(16, dtype=torch.float64)
        for name in streams:
            torch.testing.assert_close(stored[name].double() @ ones, ones, rtol=0, atol=1e-6)
    # They are what the weights were turned by: v of the middle block, from its definition.
    W = tensors_of(dense.folder(variant))
    block = next(name for name in W if "layers.1." in name).partition("1.")[0] + "1."
    V = W[f"{block}self_attn.v_proj.weight"].double().numpy()
    R2 = stored["blocks.1.heads"].double().numpy()
    right = np.eye(16)
    if kind != "values":
        norm = "self_attn_layer_norm" if is_opt(variant) else "input_layernorm"
        V = V * W[f"{block}{norm}.weight"].double().numpy()
        right = stored["residual" if kind == "shared" else "blocks.1.residual"].double().numpy()
    expected = rotation_entropy.rotate(V, full_rotation("heads", len(V), None, R2), right)
    np.testing.assert_allclose(tensors_of(out)[f"{block}self_attn.v_proj.weight"], expected, rtol=1e-5, atol=1e-6)


# ---- refusals ----------------------------------------------------------------------------------------------------


refusal = partial(refusals.refusal, encoders.job_on)


def test_modules_between_blocks_are_not_pruned_again(turned):
    reasons = {
        "rotations are absorbed by blocks of the stock shape": [rotating("shared"), rotating("values")],
        "units are counted alike in every block": [families.recipe()],
        "its residual stream turns between blocks": [rotating("shared").model_copy(update={"rotation": None})],
    }
    for reason, recipes in reasons.items():
        for recipe in recipes:
            assert f"(remote code): {reason}" in refusal(turned("llama", "per-layer"), recipe)


def without_gain(folder: Path, *, bias: float) -> Path:
    def edit(tensors: dict[str, Tensor], _config: dict[str, Any]) -> dict[str, Tensor]:
        tensors["model.decoder.final_layer_norm.weight"][3] = 0
        tensors["model.decoder.final_layer_norm.bias"][3] = bias
        return tensors

    encoders.make(folder, "opt")
    encoders.edit_files(folder, edit)
    return folder


def test_a_bias_where_the_final_gain_is_zero(tmp_path, monkeypatch):
    random_rotations(monkeypatch)
    folder = without_gain(tmp_path / "biased", bias=0.5)
    assert refusals.refusal(lambda: prune(encoders.job_on(folder, rotating("shared")), tmp_path / "out")) == (
        "the final norm has a bias where its gain is zero, which no rotated head can repeat: "
        "rotation kind values or per-layer leaves it alone"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["biased"]
    cases = [(folder, "per-layer"), (folder, "values"), (without_gain(tmp_path / "plain", bias=0.0), "shared")]
    for source, kind in cases:
        out = tmp_path / f"{source.name}-{kind}"
        prune(encoders.job_on(source, rotating(kind)), out)
        assert distance(logits(load_rotated(out, kind)), logits(families.stock(source))) < 1e-5


# ---- masks after rotations ---------------------------------------------------------------------------------------


def job_after(dense: Sources, turned: Callable[..., Path], variant: str, kind: str):
    """A job with statistics of the dense model, and the rotations that `turned` wrote."""
    stored = load_file(turned(variant, kind) / ROTATIONS)

    def of(block: int) -> tuple[Tensor | None, Tensor]:
        residual = stored.get("residual", stored.get(f"blocks.{block}.residual"))
        return None if residual is None else residual.double(), stored[f"blocks.{block}.heads"].double()

    recipe = rotating(kind, {"method": "sparsegpt"}, ratio=0.5)
    job = preview_job(encoders.request_on(dense.folder(variant), recipe, dense.statistics(variant, folds=2)))
    return replace(job, basis=replace(job.basis, rotations=of))


@pytest.mark.parametrize(
    ("variant", "kind"),
    one_of(5, itertools.product(["llama-biases", "qwen2", "qwen3", "seed_oss-biases-mha", *OPT[:3]], KINDS)),
)
def test_moments_under_rotations_are_those_of_the_rotated_model(dense, turned, variant, kind):
    """Moments of every linear's input, from the dense model's statistics, are those that hooks see in the output."""
    job = job_after(dense, turned, variant, kind)
    model = whole(load_rotated(turned(variant, kind), kind), variant)
    sites = [(block, at) for block in range(BLOCKS) for at in range(len(model.inputs))]
    seen = model.tokens(data_of(variant), sites)
    source = open_moments(job, {})
    for block in range(BLOCKS):
        by_input = source.moments(block, {}, list(job.model.family.inputs))
        assert list(by_input) == [group[0].disk for group in model.inputs]
        for at, folds in enumerate(by_input.values()):
            assert len(folds) == 2
            moments, X = sum_folds(folds), seen[block, at]
            assert moments.count == len(X)
            G = X.T @ X
            scale = float(G.abs().max())
            torch.testing.assert_close(moments.gram, G, rtol=1e-4, atol=1e-5 * scale)
            torch.testing.assert_close(moments.square, G.diagonal(), rtol=1e-4, atol=1e-5 * scale)
            torch.testing.assert_close(moments.sum, X.sum(0), rtol=1e-4, atol=1e-5 * float(X.abs().sum(0).max()))
            assert moments.absolute.isnan().all()


@pytest.mark.parametrize(
    ("variant", "kind", "rule", "target"),
    [
        ("llama-gqa-tied", "per-layer", "wanda", "by block"),
        ("opt", "per-layer", "wanda", "by input"),
        ("opt-tied", "shared", "sparsegpt", "by input"),
    ],
)
def test_masks_after_rotations_are_those_of_the_rotated_model(
    turned, dense, tmp_path, monkeypatch, variant, kind, rule, target
):
    mask, by_hand = RULES[rule]
    recipe = rotating(kind, mask, ratio=0.5, **TARGETS[target])
    recipe = recipe.model_copy(update={"rotation": recipe.rotation.model_copy(update={"importance": "magnitude"})})
    random_rotations(monkeypatch)
    prune_by_mask(dense.folder(variant), tmp_path / "out", recipe, data_of(variant))
    unpruned = turned(variant, kind)
    expected = whole(load_rotated(unpruned, kind), variant).mask(data_of(variant), by_hand, target)
    assert_masked(tmp_path / "out", unpruned, expected, updated=rule == "sparsegpt")


@pytest.mark.parametrize(
    ("variant", "target"), [("wide llama", "by input"), ("wide qwen3", "dense"), ("wide opt", "dense")]
)
def test_rotating_and_masking_equals_masking_what_was_rotated(dense, turned, tmp_path, monkeypatch, variant, target):
    """One R1, then 2:4 by Wanda: in one run, and in two."""
    mask, data, plain = {"method": "wanda", "pattern": "2:4"}, data_of(variant), TARGETS[target]
    first = turned(variant, "shared")
    two_runs = FullRecipe.model_validate({"version": 1, "name": "test", "mask": mask} | plain)
    prune_by_mask(first, tmp_path / "two", two_runs, data)
    random_rotations(monkeypatch)
    one_run = FullRecipe.model_validate(two_runs.model_dump() | {"rotation": {"kind": "shared", "steps": 2}})
    report = prune_by_mask(dense.folder(variant), tmp_path / "one", one_run, data)
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    zeros = [linear["weight"] for linear in report["linears"]]
    assert len(zeros) == BLOCKS * (6 if "opt" in variant else 7)
    for name in zeros:
        # Rounding of the moments may decide between two that are all but equal.
        assert ((one[name] == 0) != (two[name] == 0)).float().mean() < (0.005 if target == "dense" else 1e-9), name
    assert all(torch.equal(one[name], two[name]) for name in one if name not in zeros)
    outputs, expected = (logits(families.stock(tmp_path / name)) for name in ("one", "two"))
    assert distance(outputs, expected) < 0.02
    assert distance(outputs, logits(families.stock(first))) > 0.1


# ---- what is learned ---------------------------------------------------------------------------------------------


def entropy_by_hand(dense: Sources, variant: str, kind: str, backbone: str) -> list[float]:
    """Entropy of every block's importances before any rotation, of the linears that one will meet."""
    model = whole(families.stock(dense.folder(variant)), variant)
    opt = is_opt(variant.removeprefix("wide "))
    sites = [(block, at) for block in range(BLOCKS) for at in range(len(model.inputs))]
    seen = model.tokens(data_of(variant), sites)
    weights = {name: weight.double() for name, weight in model.weights().items()}
    tensors = tensors_of(dense.folder(variant))
    reads = {0: "self_attn_layer_norm", 2: "final_layer_norm"} if opt else {}
    reads = reads or {0: "input_layernorm", 2: "post_attention_layernorm"}
    entropies = []
    for block in range(BLOCKS):
        prefix, entropy = model.prefix.format(block), 0.0
        for at, group in enumerate(model.inputs):
            X = seen[block, at].clone()
            for linear in group:
                W = weights[f"{prefix}{linear.disk}.weight"].clone()
                rows, columns = linear.disk.endswith(("o_proj", "out_proj")), linear.disk.endswith("v_proj")
                read = X
                if kind != "values":
                    rows, columns = rows or at in reads, columns or at not in reads
                    if at in reads:
                        gain = tensors[f"{prefix}{reads[at]}.weight"].double()
                        shift = tensors.get(f"{prefix}{reads[at]}.bias", torch.zeros(1)).double()
                        read, W = (X - shift) / gain, W * gain
                    elif opt:
                        W = W - W.mean(0)
                if rows or columns:
                    eye, right = np.eye(len(W)), np.eye(W.shape[1])
                    H = (read.T @ read).numpy()
                    scores = rotation_entropy.importance(backbone, W.numpy(), H, 0.01, eye, right)
                    entropy += rotation_entropy.entropy(scores, rows, columns)
        entropies.append(entropy)
    return entropies


def learning(kind: str, backbone: str, steps: int = 1, **more: Any) -> FullRecipe:
    rotation = {"kind": kind, "steps": steps, "importance": backbone, "learning_rate": 0.02}
    return rotating(kind, rotation=rotation, **more)


@pytest.mark.parametrize(
    ("learned", "backbone"),
    one_of(
        3,
        itertools.product(
            [("llama-biases", "per-layer"), ("qwen3", "shared"), ("opt", "per-layer"), ("opt", "values")],
            ["magnitude", "wanda", "sparsegpt"],
        ),
    ),
)
def test_the_entropy_that_is_lowered_is_the_papers(dense, tmp_path, learned, backbone):
    """Learned rotations lower the entropy of the dense weights and inputs, gains of norms in the weights they feed."""
    variant, kind = learned
    report = prune_by_mask(dense.folder(variant), tmp_path / "out", learning(kind, backbone), data_of(variant))
    learned, expected = report["rotation"]["learned"], entropy_by_hand(dense, variant, kind, backbone)
    if kind == "shared":
        expected = [sum(expected)]
    assert [record["entropy_before"] for record in learned] == pytest.approx(expected, rel=1e-4)
    assert all(record["entropy_after"] <= record["entropy_before"] for record in learned)
    assert [record["block"] for record in learned] == ([None] if kind == "shared" else list(range(BLOCKS)))


@pytest.mark.parametrize(("variant", "kind"), one_of(4, itertools.product(["llama-gqa-tied", "opt"], KINDS)))
def test_learned_rotations_leave_the_function_as_it_is(dense, tmp_path, variant, kind):
    report = prune_by_mask(dense.folder(variant), tmp_path / "out", learning(kind, "wanda", 20), data_of(variant))
    assert all(record["entropy_after"] < record["entropy_before"] for record in report["rotation"]["learned"])
    assert distance(logits(load_rotated(tmp_path / "out", kind)), logits(families.stock(dense.folder(variant)))) < 1e-5
    for name, tensor in load_file(tmp_path / "out" / ROTATIONS).items():
        wide = tensor.double()
        identity = torch.eye(wide.shape[-1], dtype=torch.float64).expand_as(wide)
        torch.testing.assert_close(wide.mT @ wide, identity, rtol=0, atol=1e-6, msg=name)
        assert float((wide - identity).abs().max()) > 1e-3, name


@pytest.mark.parametrize("backbone", ["magnitude", "sparsegpt"])
def test_terms_that_do_not_fit_in_memory_are_read_again(dense, tmp_path, monkeypatch, backbone):
    """One R1 for all blocks: the same bytes, and nothing is left beside the output."""
    folder, data = dense.folder("qwen3"), data_of("qwen3")
    prune_by_mask(folder, tmp_path / "kept", learning("shared", backbone, 3), data)
    monkeypatch.setattr(rotations, "_KEPT_BYTES", 0)
    prune_by_mask(folder, tmp_path / "again", learning("shared", backbone, 3), data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "kept"]
    assert families.contents(tmp_path / "again") == families.contents(tmp_path / "kept")


# ---- memory ------------------------------------------------------------------------------------------------------


def test_one_rotation_of_all_blocks_needs_statistics(tmp_path):
    """A stream that nobody advances would show every block the embedding's output."""
    folder = families.make(tmp_path / "dense")
    job = families.job_on(folder, rotating("shared", {"method": "wanda"}, ratio=0.5), None, windows(2))
    learner = learner_of(job)
    with pytest.raises(ValueError, match="needs statistics"):
        learner.source(learner)
    # A run measures them first, and leaves none of them.
    assert prune(job, tmp_path / "out")["rotation"]["kind"] == "shared"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]
