"""Exchanges between processes: shares, sums in a fixed order, and work that one does for all."""

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel import group as module
from ckpt_prune.parallel.group import Group, add_in_order
from tests.parallel.threads import in_threads
from tests.refusals import refusal


def numbers(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(count)
    return [torch.randn(*shape, dtype=torch.float64).mul(10.0**k).to(dtype) for k in range(count)]


@pytest.mark.parametrize(("samples", "size"), [(7, 3), (3, 3), (128, 8), (5, 1)])
def test_shares_are_contiguous_nearly_equal_and_all_of_them(samples, size):
    runs = []
    for rank in range(size):
        group = Group()
        group.rank, group.size = rank, size
        runs.append(range(samples)[group.share(samples)])
    assert [row for run in runs for row in run] == list(range(samples))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_a_sum_is_taken_in_float64_and_rounded_once():
    parts = numbers(5, 100)
    exact = sum(part.double() for part in parts)
    assert torch.equal(add_in_order(parts), exact.float())
    naive = parts[0].clone()
    for part in parts[1:]:
        naive += part
    assert not torch.equal(naive, exact.float())
    assert torch.equal(add_in_order([torch.tensor([2**53 + 1]), torch.tensor([2])]), torch.tensor([2**53 + 3]))


def test_how_terms_are_cut_into_parts_changes_no_more_than_rounding_in_float64():
    terms = numbers(6, 50, dtype=torch.float64)
    two = add_in_order([add_in_order(terms[:3]), add_in_order(terms[3:])])
    assert torch.allclose(two, add_in_order(terms), rtol=1e-14, atol=0)


def test_threads_take_turns_in_the_order_of_ranks():
    """So that a test of several processes goes the same way each time, on any machine."""
    seen = []

    def work(group):
        seen.append(group.rank)
        group.once(lambda: 1)
        seen.append(group.rank)

    for _ in range(20):
        in_threads(3, work)
    assert seen == [0, 1, 2, 0, 1, 2] * 20


def test_a_thread_that_ends_early_leaves_nobody_waiting():
    with pytest.raises(ZeroDivisionError):
        in_threads(3, lambda group: group.once(lambda: 1) if group.rank != 1 else 1 / 0)


def test_processes_add_up_in_their_order(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)
    parts = numbers(3, 5, 6)
    totals = in_threads(3, lambda group: group.add(parts[group.rank].clone()))
    assert torch.equal(totals[0], add_in_order(parts))
    assert torch.equal(
        in_threads(3, lambda group: group.add(parts[group.rank].T.contiguous().T))[0], add_in_order(parts)
    )
    assert in_threads(2, lambda group: group.add(torch.zeros(0)))[0].shape == (0,)
    assert in_threads(2, lambda group: group.add(torch.tensor(3)))[0] == 6


def test_who_differs_is_named():
    with pytest.raises(UserError, match=r"^rank 2 has another text than rank 0: all processes of a run need the same$"):
        in_threads(3, lambda group: group.agree({"model": "m", "text": "b" if group.rank == 2 else "a"}))
    assert in_threads(2, lambda group: group.agree({"model": "m"})) == [None, None]


def test_more_processes_than_samples_are_refused():
    assert refusal(in_threads, 3, lambda group: group.check_enough(2)) == (
        "3 processes cannot share 2 samples: every one needs at least one; start fewer, or take more samples"
    )
    assert in_threads(3, lambda group: group.check_enough(3)) == [None] * 3
