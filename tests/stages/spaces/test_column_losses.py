"""What fewer columns are predicted to lose, for budgets over columns and types."""

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.stages.spaces.effects.column_losses import predict_columns
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from tests.stages.whole import make_wide

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
UNITS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(str(make_wide(tmp_path_factory.mktemp("columns") / "dense", "llama")))


@pytest.fixture(scope="module")
def windows(model):
    tokens = torch.randint(model.checkpoint.config["vocab_size"], (8, 24), generator=torch.Generator().manual_seed(0))
    return TokenWindows(tokens)


def measured(model, windows, folder, *collect, effects):
    def add(statistics):
        if effects:
            add_gradients(model, statistics, windows, spaces=["mlp"], distances=False, **CPU)

    return measure_statistics(model, windows, folder, seed=0, folds=2, collect=collect, finish=add, **CPU)


def test_every_multiple_has_a_loss_that_falls_to_none_with_all_columns(model, windows, tmp_path):
    statistics = measured(model, windows, tmp_path / "s", "moments", "gram", "fisher", effects=True)
    predicted = predict_columns(model, statistics, 5, CPU["device"])
    assert predicted.losses.keys() == set(range(model.blocks))
    for by_width in predicted.losses.values():
        assert list(by_width) == [5, 10, 15, 20, UNITS]
        losses = list(by_width.values())
        assert losses == sorted(losses, reverse=True)
        assert losses[0] > 0
        assert losses[-1] == 0


def test_statistics_without_gradients_are_refused(model, windows, tmp_path):
    statistics = measured(model, windows, tmp_path / "s", "moments", "gram", effects=False)
    with pytest.raises(UserError, match="no Fisher metric"):
        predict_columns(model, statistics, 5, CPU["device"])
