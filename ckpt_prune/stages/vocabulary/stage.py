"""The work of the stage `vocabulary`: a model with fewer tokens, opened before any data is read."""

from collections.abc import Callable, Sequence
from math import floor
from typing import Any

from ckpt_prune.job.opened import Opened
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import SampleOptions
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.sizes import SizeKind, TargetSize, cost_in
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.records import VocabularyRecord
from ckpt_prune.stages.vocabulary.settle import VocabularyChoice
from ckpt_prune.stages.vocabulary.show import cost_lines, tokens_line
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows, vocabulary_rows


class VocabularyStage(Stage[Vocabulary]):
    """Keeps some of the tokens.

        version: 1
        name: fewer-tokens
        vocabulary: {scripts: [latin], size: 50%}

    `open` chooses the tokens and returns the model with these alone: samples are tokenised for it, every later stage
    works on it, and its tokenizer files are what the output gets. Nothing is left to do for blocks.
    """

    of = Vocabulary

    def open(self, model: Model, recipe: Recipe, options: SampleOptions, say: Callable[[str], None]) -> Opened:
        alone = not recipe.sizing
        limit, size = None, recipe.size
        if size is not None and size.kind != "latency":
            target = size.of(cost_in(size.kind, cost_of(model)))
            if alone:
                limit = most_rows(model, size.kind, target)
            recipe = recipe.model_copy(
                update={"size": None if alone else TargetSize.model_validate({size.kind: target})}
            )
        settled = VocabularyChoice(model, self.keys, options, limit).settle(say)
        return Opened(settled.model, recipe, settled.record)

    def kept_words(self, prepared: Prepared) -> str | None:
        return tokens_line(_record(prepared))

    def messages(self, prepared: Prepared) -> Sequence[str]:
        record = _record(prepared)
        lines = cost_lines(record)
        if not record.texts and self.keys.size is not None:
            lines.append(
                "without --text, tokens go by their rank alone, and what that costs is not measured: texts of the kind "
                "that the model is for choose better"
            )
        if record.left_out:
            lines.append(
                f"left out of the output, because they say the vocabulary in a form that is not written: "
                f"{', '.join(record.left_out)}"
            )
        return lines

    def extreme_line(self, prepared: Prepared) -> str | None:
        record = _record(prepared)
        if record.rows_kept < record.rows:
            return None
        return "no token goes: all are named, or stay in any case (a size such as 50% drops more)"

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"vocabulary": _record(prepared)}


def _record(prepared: Prepared) -> VocabularyRecord:
    record = prepared.facts(VocabularyRecord)
    assert record is not None
    return record


def most_rows(model: Model, kind: SizeKind, wanted: int) -> int:
    """Return how many rows of the embedding a model of so many parameters, bytes or FLOPs may have.

    All three grow by as much with every row.
    """
    rows = vocabulary_rows(model)
    sizes = [cost_in(kind, cost_of(keep_rows(model, None, range(count)))) for count in (rows // 2, rows)]
    per_row = (sizes[1] - sizes[0]) / (rows - rows // 2)
    return min(rows, max(0, floor(rows - (sizes[1] - wanted) / per_row)))
