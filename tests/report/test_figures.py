"""Every figure against numbers worked out by hand."""

import math
from typing import Any

import pytest

from ckpt_prune.job.records import Cost, MaskedLinear, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, Recovery
from ckpt_prune.report.figures import (
    CostChange,
    Means,
    RotationFigures,
    SpaceErrors,
    cost_changes,
    held_out_errors,
    inputs_of,
    mask_figures,
    recovery_figures,
    relative_change,
    relative_floor,
    rotation_figures,
    space_errors,
    unsolved,
    verdict,
    worse_on_held_out,
)
from tests.reporting.examples import Json, bare, kept, layer, learned, linear, recovery, site


def sites(*made: Json) -> list[SiteRecord]:
    return [SiteRecord.read(each) for each in made]


def linears(*made: Json) -> list[MaskedLinear]:
    return [MaskedLinear.read(each) for each in made]


def test_costs():
    found = cost_changes(Cost(parameters=8, bytes=16, flops=100), Cost(parameters=2, bytes=8, flops=75))
    assert found == [CostChange("parameters", 8, 2), CostChange("bytes", 16, 8), CostChange("flops", 100, 75)]
    assert [change.share for change in found] == [0.25, 0.5, 0.75]


# ---- sites -----------------------------------------------------------------------------------------------------


def test_mean_errors_of_spaces():
    """Over sites that have both errors, in the order of the sites; drift where any site has a share."""
    found = space_errors(
        sites(
            site(0, "heads", error_uncompensated=0.5, error_compensated=0.25),
            site(0, "mlp", error_uncompensated=0.4, error_compensated=0.2, share=0.5),
            site(1, "heads", error_uncompensated=0.25, error_compensated=0.0),
            site(1, "mlp", error_uncompensated=None),
            bare(0, "qk"),
        )
    )
    assert found == [SpaceErrors("heads", 0.375, 0.125, False), SpaceErrors("mlp", 0.4, 0.2, True)]
    assert space_errors([]) == []


def test_errors_on_held_out_folds():
    """Of what is compensated only."""
    made = sites(
        site(0, error_uncompensated=0.3, error_held_out=0.5),
        site(1, error_uncompensated=0.5, error_held_out=0.25),
        site(2, error_held_out=9.0, method="none"),
        site(3, error_held_out=None),
        site(0, "heads", error_uncompensated=0.5, error_held_out=0.5),
        bare(0, "qk"),
    )
    assert held_out_errors(made) == {"mlp": 0.375, "heads": 0.5}
    assert worse_on_held_out(made) == [made[0]]


def test_solves_that_stopped_short():
    made = sites(site(0, residual=1e-6), site(1, residual=2e-6), site(2, residual=None))
    assert unsolved(made) == [(made[1], 2e-6)]


@pytest.mark.parametrize(("error", "failed"), [("error_compensated", [1]), ("error_held_out", [0, 1])])
def test_the_verdict(error, failed):
    made = sites(
        site(0, error_uncompensated=0.5, error_compensated=0.25, error_held_out=0.5),
        site(1, error_uncompensated=0.5, error_compensated=0.75, error_held_out=0.75),
        site(2, error_uncompensated=0.0, error_compensated=0.0, error_held_out=0.0),
        site(3, kept=list(range(8))),
        site(4, method="none"),
        site(5, error_uncompensated=None),
    )
    found = verdict(made, error)
    assert found is not None
    assert (found.sites, [each.block for each in found.failed]) == (3, failed)
    assert verdict(made[3:], error) is None


@pytest.mark.parametrize(
    ("changes", "floor"),
    [
        ({"floor": 1.0, "j0": 4.0, "error_uncompensated": 0.5}, 0.125),
        ({"floor": 0.0, "j0": 0.0, "error_uncompensated": 0.0}, 0.0),
        ({"floor": 1.0, "j0": 0.0}, None),
        ({"floor": None}, None),
        ({"j0": None}, None),
        ({"error_uncompensated": None}, None),
    ],
)
def test_the_floor_is_relative_as_errors_are(changes, floor):
    assert relative_floor(SiteRecord.read(site(0, **changes))) == floor


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        (site(0), 8),
        (site(0, width=12), 12),
        (site(0, "heads"), None),
        (site(0, "heads", width=16), 16),
        (site(0, width=0), 8),
        (site(0, "heads", width=-4), None),
    ],
)
def test_inputs_of_the_consumer(made, inputs):
    assert inputs_of(SiteRecord.read(made)) == inputs


# ---- masks and rotations ---------------------------------------------------------------------------------------


def test_a_mask():
    made = linears(
        linear(0, zeros=16, error=0.25, damp=0.01),
        linear(1, zeros=8, error=0.75, damp=0.1, rows=4, columns=2),
        linear(2, zeros=0, error=None, damp=None),
        linear(3, zeros=32, error=0.5, damp=0.0100001),
    )
    found = mask_figures(made, 0.01)
    assert found is not None
    assert (found.linears, found.zeros, found.size, found.share) == (4, 56, 104, 56 / 104)
    assert found.mean_error == 0.5
    assert found.worst == (made[1], 0.75)
    assert found.damped == [(made[1], 0.1), (made[3], 0.0100001)]
    unknown = mask_figures(made[2:3], None)
    assert unknown is not None
    assert (unknown.mean_error, unknown.worst, unknown.damped) == (None, None, [])
    assert mask_figures([], 0.01) is None


def test_rotations():
    made = [Learned.read(learned(0, 50.0, 40.0, 3)), Learned.read(learned(1, 50.0, 20.0, 15))]
    found = rotation_figures(made)
    assert found == RotationFigures(100.0, 60.0, (3, 15))
    assert found.change == pytest.approx(-0.4)
    assert rotation_figures([*made, Learned.read({"block": 2})]) is None
    assert rotation_figures([]) is None
    still = rotation_figures([Learned.read(learned(None, 0.0, 0.0, 1) | {"steps": None})])
    assert still == RotationFigures(0.0, 0.0, None)
    assert still.change is None


@pytest.mark.parametrize(
    ("before", "after", "change"), [(2.0, 1.0, -0.5), (0.0, 1.0, None), (None, 1.0, None), (1.0, None, None)]
)
def test_relative_changes(before, after, change):
    assert relative_change(before, after) == change


# ---- recovery --------------------------------------------------------------------------------------------------


def recovered(*layers: Json, **changes: Any) -> Any:
    return recovery_figures(Recovery.read(recovery(**changes)), [RecoveredLayer.read(each) for each in layers])


def test_no_recovery():
    assert recovery_figures(None, []) is None


def test_means_over_blocks():
    """Those shown as complete need every block; the others are of the blocks that have both."""
    found = recovered(layer(0), layer(1, mse_before=1.5, mse_after=0.75, cka_after=None))
    assert (found.blocks, found.recovered) == (2, 2)
    assert found.complete == {"mse_before": 1.0, "mse_after": 0.5, "cka_before": 0.75, "cka_after": None}
    assert found.means == {"mse": Means(1.0, 0.5, 2), "cka": Means(0.75, 0.875, 1)}
    none = recovered()
    assert (none.blocks, none.means, none.worse, set(none.complete.values())) == (0, {}, False, {None})


def test_blocks_to_tell_of():
    found = recovered(
        kept(0, epochs=4),
        kept(1, epochs=0),
        kept(2, diverged=True),
        layer(3, diverged=True, mse_after=None),
        layer(4, mse_before=0.5, mse_after=0.75),
    )
    assert (found.idle, found.diverged, found.broken, found.worse) == ([0], [2, 3], [3], True)
    assert not recovered(layer(0)).worse
    assert not recovered(layer(0, mse_before=None, mse_after=0.75)).worse


def test_settings_and_data():
    found = recovered(layer(0))
    assert (found.samples, found.held_out, found.window, found.images) == (128, 13, 256, False)
    assert (found.epochs, found.lr, found.only, found.layers) == (10, 0.001, None, None)
    settings = {"only": "mlp", "layers": "0:2", "lr": "fast"}
    found = recovered(settings=settings, data={"modality": "image"})
    assert (found.only, found.layers, found.images, found.window, found.epochs) == ("mlp", "0:2", True, None, None)
    assert math.isnan(found.lr)


def test_perplexities_ascend():
    found = recovered(perplexity_after=[{"blocks": b, "perplexity": p} for b, p in ((4, 10.0), (0, 50.0), (1, None))])
    assert [(entry.blocks, entry.perplexity) for entry in found.perplexities] == [(0, 50.0), (1, None), (4, 10.0)]
