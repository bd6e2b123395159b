"""What a resumed run says is done already."""

import pytest

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.runner.open_run import summary


@pytest.mark.parametrize(
    ("units", "told"),
    [
        (["statistics of the unpruned model"], "unpruned model measured"),
        (
            ["statistics of the unpruned model", "dimensions tried 0", "dimensions tried 8"],
            "unpruned model measured, 2 models of the size tried",
        ),
        (
            ["statistics of the unpruned model", "dimensions tried 0", "hidden", "basis", "block 0"],
            "unpruned model measured, dimensions to drop chosen, basis of the residual stream measured, "
            "1 of 4 blocks done",
        ),
        (["depth tried 1", "depth"], "blocks to drop chosen"),
        (["axes tried 0:0", "axes tried 0:2"], "2 models of the size tried"),
        (["axes tried 0:0", "hidden", "depth"], "blocks to drop chosen, dimensions to drop chosen"),
        (["statistics", "effects 0"], "statistics measured, effects of 1 of 4 blocks measured"),
    ],
)
def test_units_in_words(tmp_path, units, told):
    journal = Journal(tmp_path, "job")
    for unit in units:
        journal.record(unit)
    assert summary(journal, 4, "done") == told
