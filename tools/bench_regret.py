"""Measure how well two held-out folds choose the strength of a ridge, by errors on other text.

At every `--step`-th mlp, columns go by Wanda-sp's score, and the rest is fitted to the dense outputs by every strength
of the grid. The strength that `wide_sites.choose_wide` takes by two folds, the one it takes by all folds, and λ = 0.01
are held against the strength whose fit has the least error on the other statistics. Regret is how much larger the error
is, relative.

Example:
    ckpt-prune calibrate MODEL --text calib.txt --samples 16 --window 512 --collect moments,gram --folds 4 -o CALIB
    ckpt-prune calibrate MODEL --text other.txt --samples 32 --window 512 --collect moments,gram -o OTHER
    OMP_NUM_THREADS=1 PYTHONPATH=. python tools/bench_regret.py MODEL --statistics CALIB --other OTHER
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from unittest import mock

from torch import Tensor

from ckpt_prune.compensation import wide_sites
from ckpt_prune.compensation.choice import split_folds
from ckpt_prune.compensation.fit import Blend, lack_from_moments, squared_error
from ckpt_prune.compensation.methods import GRID, METHODS, absolute_strength
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import select_input_moments
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.scoring.scores import wanda_sp
from ckpt_prune.scoring.selection import select

METHOD, USUAL = "ridge", 0.01
"""The method whose strength is chosen, and the strength of recipe `ridge`."""
EVERY = 10**9
"""So many tokens for each kept input are never there: then `split_folds` holds out every fold."""


def errors_by_strength(weight: Tensor, calibration: Blend, other: Moments, kept: Tensor) -> dict[float, float]:
    """Return Σ ‖W x − Ŵ x_K‖² / Σ ‖W x‖² on other tokens for the ridge of every strength of the grid.

    Args:
        weight: W, (d_out, d).
        calibration: of what the kept columns lack, to which Ŵ is fitted.
        other: moments of the other tokens, with their Gram.
        kept: columns that stay, (k,) int64, ascending.
    """
    weight_kept, lack = weight[:, kept].double(), lack_from_moments(weight, other, kept)
    energy = measure_energy(weight, other)

    def error(strength: float) -> float:
        absolute = absolute_strength(strength, "relative", calibration.fit)
        change = wide_sites.fit_change(METHODS[METHOD], weight_kept, calibration.at(0.0), absolute)
        return squared_error(change, lack.at(1.0)) / energy

    return {strength: error(strength) for strength in GRID}


def measure_energy(weight: Tensor, moments: Moments) -> float:
    """Return Σ ‖W x‖² over tokens, from their Gram."""
    assert moments.gram is not None
    wide = weight.double()
    return float((wide @ moments.gram.double() * wide).sum())


def choose(
    weight_kept: Tensor, folds: Sequence[Blend], total: Blend, energies: Sequence[float], *, every_fold: bool
) -> float:
    """Return the strength that is chosen on two held-out folds, or on all; arguments are those of `choose_wide`."""
    split = partial(split_folds, kept=EVERY) if every_fold else split_folds
    with mock.patch.object(wide_sites, "split_folds", split):
        choice = wide_sites.choose_wide(weight_kept, folds, [METHOD], GRID, total=total, energies=energies)
    assert choice.best.strength is not None
    return choice.best.strength


def main(arguments: list[str] | None = None) -> None:
    """Print a line for every site, and the mean and the largest regret."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--statistics", type=Path, required=True, help="of several folds, with Grams")
    parser.add_argument("--other", type=Path, required=True, help="of other text, with Grams")
    parser.add_argument("--first", type=int, default=1, help="block")
    parser.add_argument("--step", type=int, default=3, help="blocks from one to the next")
    parser.add_argument("--ratio", type=float, default=0.2, help="of the columns, that go")
    given = parser.parse_args(arguments)
    model, statistics, others = Model.open(given.model), Statistics(given.statistics), Statistics(given.other)
    consumer = model.family.columns["mlp"].consumer
    regrets: dict[str, list[float]] = {"two folds": [], "all folds": [], f"λ = {USUAL}": []}
    print(f"{'block':>5} {'kept':>6} {'tokens':>8} {'least error':>12}  λ: least, two folds, all folds")
    for block in range(given.first, model.blocks, given.step):
        weight, name = model.read_block(block)[model.tensor(block, consumer)], model.moments_name(block, "mlp")
        folds = select_input_moments(statistics.read_moments(block)[name])
        other = sum_folds(select_input_moments(others.read_moments(block)[name]))
        summed = sum_folds(folds)
        kept = select(wanda_sp(weight, summed), round((1 - given.ratio) * weight.shape[1]))
        total, lacks = lack_from_moments(weight, summed, kept), [lack_from_moments(weight, f, kept) for f in folds]
        energies = [measure_energy(weight, fold) for fold in folds]
        errors = errors_by_strength(weight, total, other, kept)
        best = min(errors, key=lambda strength: errors[strength])
        how = (weight[:, kept].double(), lacks, total, energies)
        chosen = [choose(*how, every_fold=every_fold) for every_fold in (False, True)]
        for values, strength in zip(regrets.values(), [*chosen, USUAL], strict=True):
            values.append(errors[strength] / errors[best] - 1)
        strengths = ", ".join(f"{strength:g}" for strength in (best, *chosen))
        print(f"{block:5} {len(kept):6} {summed.count:8} {errors[best]:12.4f}  {strengths}", flush=True)
    for what, values in regrets.items():
        print(f"regret of {what}: mean {mean(values):.2%}, most {max(values):.2%}")


if __name__ == "__main__":
    main()
