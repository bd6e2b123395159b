"""Choosing types of a file's matrices, and measuring files at every token in llama.cpp."""

import itertools
import math
import re
from dataclasses import replace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.budget.rounding_losses import left_by_feedback
from ckpt_prune.evaluation.perplexity import compare, perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.gguf.choosing import TypeBudget
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.importance import importance_of_statistics
from ckpt_prune.gguf.losses import predict_type_losses, round_inputs
from ckpt_prune.gguf.score import read_reference
from ckpt_prune.gguf.types import OUTER
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.data import ProofOptions
from tests.gguf_files.tiny import save

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("score")


@pytest.fixture(scope="module")
def folder(place):
    return save(place / "model", "llama", hidden_size=64, intermediate_size=256, num_hidden_layers=2)


@pytest.fixture(scope="module")
def windows():
    return torch.randint(3, 2000, (4, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def statistics(folder, windows, place):
    model, samples = open_model(str(folder), Opening()), TokenWindows(windows)
    return measure_statistics(
        model, samples, place / "statistics", seed=0, folds=1, collect=("moments", "linears"), **CPU
    )


@pytest.fixture(scope="module")
def budget(folder, windows, statistics):
    pytest.importorskip("libgguf")
    model = open_model(str(folder), Opening())
    importance = importance_of_statistics(statistics, model, "q8_0")
    losses = predict_type_losses(model, TokenWindows(windows), importance, "q8_0", **CPU)
    assert losses.weighed == losses.fitted  # error feedback was tried nowhere
    return TypeBudget(FilePlanner(model), losses.weighed)


@pytest.fixture(scope="module")
def reference(folder, windows):
    return read_reference(folder, windows)


def write(folder, place, statistics, choice):
    proving = ProofOptions()
    how = {"proof": False, "statistics": statistics.folder, "overwrite": True}
    export_gguf(str(folder), place, proving, kind=choice.chosen, others=choice.others, **how)
    return place


def test_a_file_of_the_same_weights_predicts_the_same(folder, place, reference, windows):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    export_gguf(str(folder), place / "same.gguf", ProofOptions(), kind="f32", proof=False)
    score = reference.score(place / "same.gguf")
    assert score.kl < 1e-5
    assert score.top1 > 0.99
    assert score.accepted == pytest.approx(1, abs=2e-3)
    dense = perplexity(load_model(folder, device="cpu", dtype=torch.float32), windows).perplexity
    assert reference.perplexity == pytest.approx(dense, rel=1e-5)
    assert score.perplexity == pytest.approx(dense, rel=1e-3)
    assert min(score.speeds) > 0


def test_each_of_several_texts_is_told(folder, place, windows, reference):
    """As a file of these windows alone would be told, with the same tokens and with others."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    export_gguf(str(folder), place / "texts.gguf", ProofOptions(), kind="q4_0", proof=False)
    of_two = read_reference(folder, windows, texts=["a", "b", "b", "a"])
    for parts in (None, lambda token: [token, 5]):
        score = of_two.score(place / "texts.gguf", parts)
        for name, own in (("a", [0, 3]), ("b", [1, 2])):
            alone = read_reference(folder, windows[own]).score(place / "texts.gguf", parts)
            assert score.kl_of[name] == pytest.approx(alone.kl, rel=1e-3)
            assert not alone.kl_of


def test_what_a_text_costs_more_with_other_tokens_is_told_by_tokens_as_all_write_it(folder, place, windows, reference):
    """With the same tokens nothing. With another token in place of one, what the model says of that text."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    export_gguf(str(folder), place / "tokens.gguf", ProofOptions(), kind="f32", proof=False)
    assert reference.score(place / "tokens.gguf", lambda token: [token]).kl == pytest.approx(0, abs=1e-4)
    gone = int(windows[0, 3])

    def parts(token):
        return [5, 6, 7] if token == gone else [token]

    model, nll = load_model(folder, device="cpu", dtype=torch.float32), []
    for window in windows:
        ids = torch.tensor([[part for token in window.tolist() for part in parts(token)]])
        first = len(parts(int(window[0])))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].log_softmax(-1)
        nll.append(float(-logits[first - 1 : -1].gather(1, ids[0, first:, None]).sum()))
    tokens = windows[:, 1:].numel()
    dense = math.log(reference.perplexity) * tokens
    score = reference.score(place / "tokens.gguf", parts)
    assert score.kl == pytest.approx((sum(nll) - dense) / tokens, abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(sum(nll) / tokens), rel=1e-3)
    assert (score.top1, score.kl_median) == (None, None)
    assert reference.diverge(folder, parts) == pytest.approx((sum(nll) - dense) / tokens, abs=1e-4)


def test_types_keep_to_the_bytes_of_a_file_and_lose_what_is_predicted(folder, place, statistics, budget, reference):
    """Second order and a handful of labels: within a factor of two, as the tiny model has huge errors."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    whole = budget.of({name: max(kinds, key=lambda kind: -kinds[kind]) for name, kinds in budget.losses.items()})
    limit = (budget.least + whole.bytes) // 2
    choice = budget.at_bytes(limit)
    file = write(folder, place / "chosen.gguf", statistics, choice)
    assert file.stat().st_size == choice.bytes
    assert 0.98 * limit < choice.bytes <= limit
    assert 0.5 < reference.score(file).kl / choice.kl < 2


@pytest.mark.parametrize(("kind", "loss"), [(Kind.IQ4_NL, 4 * 4**-0.25), (Kind.Q5_0, 2.0), (Kind.F16, 0.0)])
def test_a_type_that_was_not_tried_loses_as_one_of_as_many_bits(budget, kind, loss):
    """One with a table of levels as the other one with that table."""
    name, tried = "blk.0.ffn_down.weight", {Kind.Q6_K: 1.0, Kind.Q5_K: 2.0, Kind.Q4_K: 3.0, Kind.IQ4_XS: 4.0}
    assert replace(budget, losses={name: tried}).predict({name: kind}) == pytest.approx(loss)


def test_the_smallest_file_within_a_loss_is_no_larger_than_one_that_loses_as_much(budget):
    choice = budget.at_bytes((3 * budget.least) // 2)
    smallest = budget.at_loss(choice.kl)
    assert smallest.bytes <= choice.bytes
    assert smallest.kl <= choice.kl
    with pytest.raises(BudgetError):
        budget.at_bytes(budget.least - 1)


def test_every_matrix_is_named_once(budget):
    choice = budget.at_bytes((5 * budget.least) // 4)
    matrices = [name for name in budget.losses if name.startswith("blk.")]
    assert len(matrices) == 2 * 7
    for name in matrices:
        assert sum(re.search(pattern, name) is not None for pattern in choice.others.matrices) == 1
    named = [part.split()[0] for part in choice.words().split("; ")]
    assert sorted(named) == sorted(set(named))
    assert set(named) == {"embedding", "head", *(name.split(".")[2] for name in matrices)}


@pytest.mark.parametrize("size", [32, 256])
def test_inputs_are_rounded_as_llama_cpp_rounds_them(size):
    """ggml's q8_0 and q8_K hold the same codes; the scale of q8_0 is a float16."""
    libgguf = pytest.importorskip("libgguf")
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(3)) * torch.logspace(0, 4, 5)[:, None]
    rounded = round_inputs(x, size)
    if size == 32:
        kind = Kind.Q8_0
        theirs = torch.from_numpy(libgguf.dequantize_rows(libgguf.quantize_rows(x.numpy(), kind), kind)).view(5, 512)
        torch.testing.assert_close(rounded, theirs, rtol=2**-11 + 2**-22, atol=0)
    step = x.view(5, -1, size).abs().amax(-1, keepdim=True) / 127
    codes = rounded.view(5, -1, size) / step
    assert torch.allclose(codes, codes.round(), rtol=0, atol=127 * 2**-21)
    assert ((rounded - x).view_as(codes).abs() <= step * (0.5 + 127 * 2**-22)).all()
    assert round_inputs(x[:, :48], size).equal(x[:, :48])  # they fill no blocks


def test_error_feedback_is_tried_where_grams_are_known(folder, windows, statistics):
    """What it leaves in one block, on other windows, holds for the same matrices of the other block."""
    pytest.importorskip("libgguf")
    model, others = open_model(str(folder), Opening()), torch.randint(3, 2000, (32, 40))
    importance = importance_of_statistics(statistics, model, "q8_0")
    stream = open_stream(model, TokenWindows(others), **CPU)
    inputs = dict.fromkeys(model.family.inputs, True)
    grams = {}
    for block in range(model.blocks):
        moments = stream.observe(block, model.read_block(block), inputs, advance=True)
        if block == 0:
            for first, modules in model.inputs(block).items():
                grams |= {model.tensor(block, module): moments[first][0] for module in modules}
    grams["lm_head.weight"] = stream.observe_head(gram=True)[0]
    losses = predict_type_losses(model, TokenWindows(windows), importance, "q8_0", grams=grams, **CPU)
    shares = {
        name: {kind: losses.fitted[name][kind] / value for kind, value in own.items()}
        for name, own in losses.weighed.items()
    }
    assert all(share <= 1 for own in shares.values() for share in own.values())
    for matrix in ("attn_q", "attn_output", "ffn_up", "ffn_down"):
        first, second = (shares[f"blk.{block}.{matrix}.weight"] for block in range(2))
        assert first.keys() == second.keys()
        assert any(share < 1 for share in second.values())
    assert min(shares["output.weight"].values()) < 1
    assert all(share == 1 for share in shares["token_embd.weight"].values())


def test_a_block_with_a_huge_loss_tells_no_more_of_others_than_one_with_a_small_one(place):
    """Error feedback leaves a tenth of the huge loss and half of the small one."""
    model = open_model(str(save(place / "three", "llama", hidden_size=64, num_hidden_layers=3)), Opening())
    huge, small = ({"Q4_K": value, "Q4_K by error feedback": left} for value, left in ((10.0, 1.0), (0.01, 0.005)))
    downs = [f"model.layers.{block}.mlp.down_proj.weight" for block in range(3)]
    shares = left_by_feedback(model, dict(zip(downs, (huge, small, {"Q4_K": 0.01}), strict=True)))
    assert [shares[name]["Q4_K"] for name in downs] == pytest.approx([0.1, 0.5, 0.3])


def test_a_checkpoint_diverges_from_another_as_evaluation_says(folder, place, reference, windows):
    other = save(
        place / "other", "llama", initializer_range=0.21, hidden_size=64, intermediate_size=256, num_hidden_layers=2
    )
    models = [load_model(each, device="cpu", dtype=torch.float32) for each in (other, folder)]
    assert reference.diverge(other) == pytest.approx(compare(*models, windows).kl, rel=1e-4)
    assert reference.diverge(folder) < 1e-6


# ---- types and columns together --------------------------------------------------------------------------------------

ROUNDED = {
    "blk.0.ffn_up.weight": {Kind.Q8_0: 0.01, Kind.Q4_0: 0.20},
    "blk.0.ffn_down.weight": {Kind.Q8_0: 0.02, Kind.Q4_K: 0.09},
    "blk.1.ffn_up.weight": {Kind.Q8_0: 0.01, Kind.Q4_0: 0.13},
    "blk.1.attn_q.weight": {Kind.Q8_0: 0.01, Kind.Q4_0: 0.05},
}
COLUMNS = {0: {128: 0.11, 256: 0.0}, 1: {128: 0.30, 256: 0.0}}
SHORT = {
    Kind.Q8_0: 0.02,
    Kind.Q4_0: 0.09,
    Kind.IQ4_NL: 0.09,
    **{Kind.Q4_1: 0.045, Kind.Q5_0: 0.0225, Kind.Q5_1: 0.01125},
}
"""Rows of 128 columns fill no blocks of q4_k: types that they fill lose as it does, a quarter for each bit more."""
ELEMENTS = {name: 64 * (64 if "attn" in name else 256) for name in ROUNDED}


def all_choices(base, *, alike):
    """Yield bytes and loss of every combination, by the sizes of ggml's blocks."""
    for widths in itertools.product((128, 256), repeat=2):
        if alike and widths[0] != widths[1]:
            continue
        down = SHORT if widths[0] < 256 else ROUNDED["blk.0.ffn_down.weight"]
        rounded = ROUNDED | {"blk.0.ffn_down.weight": down}
        for kinds in itertools.product(*rounded.values()):
            size, lost = base, sum(COLUMNS[block][width] for block, width in enumerate(widths))
            for (name, by_kind), kind in zip(rounded.items(), kinds, strict=True):
                share = widths[int(name.split(".")[1])] / 256 if "ffn" in name else 1
                elements, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
                size += -(-ELEMENTS[name] * share * bytes_of_block / elements // 32) * 32
                lost += share * by_kind[kind]
            yield int(size), lost


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("spent", [0.0, 0.1, 0.35, 0.6, 0.85])
def test_types_and_columns_of_one_budget_lose_least_of_all_combinations(folder, alike, spent):
    planner = FilePlanner(open_model(str(folder), Opening()))
    budget = TypeBudget(planner, ROUNDED, COLUMNS, alike)
    plan = planner.plan("q8_0", weighted=True)
    base = plan.bytes - sum(plan.tensor_bytes[name] for name in ROUNDED)
    every = list(all_choices(base, alike=alike))
    assert budget.least == min(size for size, _ in every)
    limit = int(budget.least + spent * (plan.bytes - budget.least))
    choice = budget.at_bytes(limit)
    assert choice.kl == pytest.approx(min(lost for size, lost in every if size <= limit))
    assert (choice.bytes, pytest.approx(choice.kl)) in every
    assert choice.columns.keys() in ({0, 1}, set())
    smallest = budget.at_loss(choice.kl + 1e-9)
    assert smallest.bytes == min(size for size, lost in every if lost <= choice.kl + 1e-9)


def test_matrices_of_which_no_loss_is_known_keep_8_bits(tmp_path):
    """Those of convolutions over tokens: the file is as large as the budget counts."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "block_auto_adjust_ff_dim": False}
    folder = save(tmp_path / "model", "lfm2", **sizes, layer_types=["conv", "full_attention"])
    planner = FilePlanner(open_model(str(folder)))
    losses = {f"blk.{block}.ffn_down.weight": {Kind.Q8_0: 0.0, Kind.Q4_K: 1.0} for block in range(2)}
    budget = TypeBudget(planner, losses | {name: {Kind.Q8_0: 0.0} for name in OUTER})
    choice = budget.at_bytes(budget.least)
    plan = planner.plan(choice.chosen, choice.others, weighted=True)
    assert plan.bytes == choice.bytes
    assert plan.kinds["blk.1.ffn_down.weight"] == Kind.Q4_K
    assert plan.kinds["blk.0.shortconv.in_proj.weight"] == Kind.Q8_0
    assert "shortconv.in_proj q8_0" in choice.words().split("; ")


def test_rows_that_no_type_takes_are_not_in_question(tmp_path):
    """Four heads of 12: what reads them has 48 columns, and stays in float16."""
    pytest.importorskip("libgguf")
    model = open_model(str(save(tmp_path / "model", "qwen3", head_dim=12, num_hidden_layers=2)))
    windows = TokenWindows(torch.randint(3, 2000, (2, 16), generator=torch.Generator().manual_seed(1)))
    losses = predict_type_losses(model, windows, {}, "q8_0", **CPU).weighed
    planner = FilePlanner(model)
    budget = TypeBudget(planner, losses)
    choice = budget.at_bytes(budget.least)
    plan = planner.plan(choice.chosen, choice.others, weighted=True)
    assert plan.bytes == choice.bytes
    assert plan.kinds["blk.1.attn_output.weight"] == Kind.F16
