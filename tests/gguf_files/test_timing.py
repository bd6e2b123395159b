"""Times of types, told by files of zeros: nothing here looks at a clock, but at what is made of times."""

import math
from itertools import product

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.gguf import timing
from ckpt_prune.gguf.choosing import TypeBudget
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.timing import FileTimes, time_types
from ckpt_prune.gguf.types import is_matrix, kinds_of
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.recipe.sizes import Timed
from tests.gguf_files.tiny import save

TOKEN, TEXT = Timed(single=True), Timed(16)
PICOSECONDS = {Kind.Q8_0: 4.0, Kind.Q4_0: 2.0, Kind.IQ4_NL: 3.0, Kind.Q4_K: 1.5, Kind.F16: 0.0}
OUTSIDE = 50_000.0


@pytest.fixture(scope="module")
def planner(tmp_path_factory) -> FilePlanner:
    """Plans files of a model with a head of its own, in which only matrices of MLPs have rows that q4_k fills."""
    folder = tmp_path_factory.mktemp("timed") / "model"
    return FilePlanner(open_model(str(save(folder, "llama", intermediate_size=512, num_hidden_layers=2))))


def _time(layout, kinds, timed) -> float:
    """A runtime that takes just this long."""
    names = [name for name in layout.tensors if name.startswith("blk.") or (timed.single and name == "output.weight")]
    matrices = [name for name in names if len(layout.tensors[name].shape) == 2]
    return OUTSIDE + sum(PICOSECONDS[kinds[name]] * math.prod(layout.tensors[name].shape) for name in matrices)


@pytest.mark.parametrize("timed", [TOKEN, TEXT])
def test_times_of_types_are_told_apart(planner, tmp_path, monkeypatch, timed):
    """Also of a type that only some matrices take, and from what does not depend on the weights."""
    monkeypatch.setattr(timing, "_time_zeros", lambda _planner, layout, kinds, *_: _time(layout, kinds, timed))
    kinds = [Kind.Q4_0, Kind.IQ4_NL, Kind.Q4_K]
    times = time_types(planner, kinds, timed, tmp_path, columns=256)
    assert times.outside == pytest.approx(OUTSIDE)
    assert times.by_kind == pytest.approx({kind: PICOSECONDS[kind] for kind in (Kind.Q8_0, *kinds)})
    untimed = ("token_embd.weight",) if timed.single else ("token_embd.weight", "output.weight")
    assert times.untimed == untimed
    assert FileTimes.read(times.note()) == times
    with_all = time_types(planner, kinds, timed, tmp_path)
    assert with_all.outside == 0
    assert with_all.by_kind[Kind.Q8_0] > PICOSECONDS[Kind.Q8_0]


def test_of_experts_those_that_a_token_is_sent_to_take_time(tmp_path, monkeypatch):
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    mixture = FilePlanner(open_model(str(save(tmp_path / "model", "granitemoe", **experts, tie_word_embeddings=True))))

    def time(_planner, layout, kinds, *_):
        used = {
            name: 0.4 if "_exps" in name else 1.0 for name, weight in layout.tensors.items() if is_matrix(name, weight)
        }
        return sum(
            share * PICOSECONDS[kinds[name]] * math.prod(layout.tensors[name].shape) for name, share in used.items()
        )

    monkeypatch.setattr(timing, "_time_zeros", time)
    times = FileTimes.read(time_types(mixture, [Kind.Q4_0], TOKEN, tmp_path).note())
    assert times.by_kind == pytest.approx({kind: PICOSECONDS[kind] for kind in (Kind.Q8_0, Kind.Q4_0)})
    assert times.of("blk.0.ffn_up_exps.weight", Kind.Q4_0, 1000) == pytest.approx(0.4 * times.of("q", Kind.Q4_0, 1000))


def test_a_file_of_zeros_is_a_file_as_large_as_planned(planner, tmp_path):
    layout, plan = lay_out(planner.model, "q8_0"), planner.plan("q4_0")
    planner.write_zeros(tmp_path / "zeros.gguf", layout, "q4_0", plan.kinds)
    assert (tmp_path / "zeros.gguf").stat().st_size == plan.bytes
    read = gguf.GGUFReader(tmp_path / "zeros.gguf")
    assert {each.name: each.tensor_type for each in read.tensors} == plan.kinds
    assert not any(each.data.any() for each in read.tensors)


@pytest.mark.parametrize("timed", [TOKEN, TEXT])
def test_llama_cpp_runs_files_of_zeros(planner, tmp_path, monkeypatch, timed):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "REPEATS", 1)
    times = time_types(planner, [Kind.Q4_K], timed, tmp_path, columns=256)
    assert times.by_kind.keys() == {Kind.Q8_0, Kind.Q4_K}
    assert all(0 < each < math.inf for each in times.by_kind.values())
    assert 0 <= times.outside < math.inf
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.05, 0.4, 0.7])
def test_a_time_is_spent_at_the_least_loss(planner, share):
    """The choice is the best of all combinations: types of two matrices, and columns of one of them."""
    names = ["blk.0.ffn_down.weight", "blk.1.attn_q.weight"]
    losses = {names[0]: {Kind.Q8_0: 0.1, Kind.Q4_K: 0.4}, names[1]: {Kind.Q8_0: 0.05, Kind.Q4_0: 0.9}}
    columns = {0: {512: 0.0, 256: 0.3}}
    budget = TypeBudget(planner, losses, columns)
    speeds = {kind: PICOSECONDS[kind] for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K)}
    times = FileTimes(speeds, 100.0)
    weights = {name: math.prod(lay_out(planner.model).tensors[name].shape) for name in names}
    every = [
        (
            100 + PICOSECONDS[down] * weights[names[0]] * width / 512 + PICOSECONDS[query] * weights[names[1]],
            losses[names[0]][down] * width / 512 + losses[names[1]][query] + columns[0][width],
        )
        for down, query, width in product(*losses.values(), columns[0])
    ]
    least, most = min(time for time, _ in every), max(time for time, _ in every)
    limit = least + share * (most - least)
    choice = budget.at_time(limit, times)
    assert choice.kl == pytest.approx(min(lost for time, lost in every if time <= limit))
    assert (pytest.approx(choice.time), pytest.approx(choice.kl)) in every
    assert choice.time is not None
    assert choice.time <= limit
    with pytest.raises(BudgetError) as failure:
        budget.at_time(least - 1, times)
    assert failure.value.least == pytest.approx(least)


def test_a_mixture_with_a_type_that_was_not_timed_has_no_time(planner):
    budget = TypeBudget(planner, {"blk.0.attn_q.weight": {Kind.Q8_0: 0.1}})
    kinds = kinds_of(lay_out(planner.model), "q8_0")[0]
    assert budget.time(kinds, FileTimes({Kind.Q4_0: 1.0}, 0.0)) == math.inf
    assert budget.time(kinds, FileTimes({Kind.Q8_0: 1.0}, 3.0)) == 3 + 32 * 32
