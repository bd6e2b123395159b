"""The work of the stage `bare`: blocks lose their attention and a part of their MLP, and are trained (DC-ViT)."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.bare.keys import Bare
from ckpt_prune.stages.bare.preview import check_bare, lay_out
from ckpt_prune.stages.bare.records import BareRecord
from ckpt_prune.stages.bare.run import replace_blocks


class BareStage(Stage[Bare]):
    """Takes the attention and a part of the MLP from blocks, and trains what is before the next one.

        version: 1
        name: mine
        ratio: 0.17
        bare: {epochs: 100, trial_epochs: 10}

    In order: `check` refuses models without such blocks, `check_training` a run without images. `preview` lays the
    output out. `run` tries, replaces and trains. `report` says which blocks, and what training gained.
    """

    of = Bare
    measured_words = "the features before the head, with each block replaced"

    def check(self, prepared: Prepared) -> None:
        check_bare(prepared)

    def check_training(self, prepared: Prepared) -> None:
        if prepared.live is None:
            raise UserError(f"recipe {prepared.recipe.name} trains on images: give --images")
        if len(prepared.live.samples) < 2:
            raise UserError(f"recipe {prepared.recipe.name} trains on some images and measures on others: give more")

    def preview(self, prepared: Prepared) -> Prepared:
        return lay_out(prepared)

    def kept_words(self, prepared: Prepared) -> str | None:
        record = prepared.facts(BareRecord)
        if record is None:
            return None
        counts = sorted({len(each.columns) for each in record.replaced})
        columns = " or ".join(map(str, counts))
        lose = f"{len(record.replaced)} of {plural(record.blocks, 'block')} lose their attention"
        return f"{lose} and keep {columns} of {record.columns} columns of their mlp"

    def plan_lines(self, prepared: Prepared) -> list[str]:
        record = prepared.facts(BareRecord)
        count = 0 if record is None else len(record.replaced)
        tries = (self.keys.trial_epochs or self.keys.epochs) * prepared.whole.model.blocks
        epochs = self.keys.epochs * count + (0 if self.keys.blocks else tries)
        return [f"to be trained: the whole model is in memory twice, {plural(epochs, 'epoch')} at most"]

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return replace_blocks(prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"bare": prepared.facts(BareRecord)}
