"""Plots over what was tried or trained."""

import pytest

from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, StrengthSearch
from ckpt_prune.reporting.curves import curves
from ckpt_prune.stages.rotation.learner import _thin_out


def learned(block: int, *entropies: float, before: float = 10.0) -> Learned:
    return Learned(block=block, entropy_before=before, curve=list(enumerate(entropies)))


def test_entropy_over_steps_is_a_share_of_what_it_was():
    (figure,) = curves([learned(0, 10, 8, 6), learned(1, 10, 9, 4)])
    assert figure.across == "step"
    (series,) = figure.series
    assert [(point.place, point.value, point.low, point.high) for point in series.points] == [
        (0, 1.0, 1.0, 1.0),
        (1, pytest.approx(0.85), 0.8, 0.9),
        (2, pytest.approx(0.5), 0.4, 0.6),
    ]


def test_steps_that_not_every_block_took_are_left_out():
    (figure,) = curves([learned(0, 10, 8, 6), learned(1, 10, 9)])
    assert [point.place for point in figure.series[0].points] == [0, 1]


def test_error_over_epochs():
    layers = [
        RecoveredLayer(block=b, epochs=2, best_epoch=2, diverged=False, recovered=True, curve=own)
        for b, own in enumerate(([0.4, 0.2, 0.1], [0.2, 0.15, 0.1], []))
    ]
    (figure,) = curves(layers=layers)
    assert (figure.title, figure.across) == ("Error over epochs", "epoch")
    assert [point.value for point in figure.series[0].points] == pytest.approx([1.0, 0.625, 0.375])
    assert "curve" not in layers[2].model_dump()


def test_perplexity_over_powers_of_ten():
    search = StrengthSearch(chosen=1.0, perplexity={"100": 9.0, "1": 5.0, "0.01": 6.0, "1e+06": None})
    (figure,) = curves(search=search)
    assert [(point.place, point.value) for point in figure.series[0].points] == [(-2, 6.0), (0, 5.0), (2, 9.0)]
    assert figure.series[0].points[1].text == "5 (chosen)"


@pytest.mark.parametrize(
    "search",
    [
        None,
        StrengthSearch(chosen=1.0, perplexity={"1": 5.0}),
        StrengthSearch(chosen=1.0, perplexity={"1": 5.0, "3": 4.0}),
    ],
)
def test_nothing_to_draw(search):
    assert curves([learned(0)], search) == []


@pytest.mark.parametrize("count", [0, 1, 2, 51, 52, 2001])
def test_a_curve_is_thinned_to_its_ends_and_what_fits(count):
    found = _thin_out([float(step) for step in range(count)])
    assert len(found) <= 52
    assert [step for step, _ in found] == [value for _, value in found]
    assert not count or (found[0][0], found[-1][0]) == (0, count - 1)
