"""The bytes and the predicted loss of every way to store each weight of a checkpoint for vLLM.

`frontier --for vllm` makes the checkpoint that these figures favour and measures it; `quantize --target-bytes` makes
it, too.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import QuantizeOptions
from ckpt_prune.recipe.sizes import parse_size
from ckpt_prune.runner.rounding_trials import RoundingTrials
from ckpt_prune.runner.runtimes import fit_to_runtimes
from ckpt_prune.stages.quantize.choosing import (
    SchemeBudget,
    SchemeChoice,
    linear_weights,
    predict_scheme_losses,
    schemes_for,
)
from ckpt_prune.stages.quantize.keys import QuantizeRecipe, quantize_recipe
from ckpt_prune.stages.quantize.output import check_model

_LOSSES = "losses of ways to store weights"
"""Entry of the journal."""


@dataclass(frozen=True)
class SchemeBudgets(RoundingTrials):
    """The budget of a checkpoint, once what each way to store each weight loses is predicted."""

    @cached_property
    def schemes(self) -> SchemeBudget:
        notes = self.journal.notes
        if _LOSSES not in notes:
            moments = dict(pair for block in range(self.model.blocks) for pair in self.moments(block).items())
            self.journal.record(_LOSSES, note=predict_scheme_losses(self.model, self.few, moments, **self.how))
        return SchemeBudget(self.model, notes[_LOSSES])


def recipe_of(model: Model, choice: SchemeChoice) -> QuantizeRecipe:
    """Return the recipe that stores weights by a choice, rounded by GPTQ."""
    usual = choice.usual
    types = choice.types(model) if set(choice.counts) != {usual.name} else {}
    return quantize_recipe(usual.format, usual.name.partition(":")[2], "gptq", types)


def check_storable(model: Model) -> None:
    """Refuse a model whose weights are not rounded, or that vLLM does not run."""
    check_model(model)
    fit_to_runtimes(quantize_recipe("int8", None, "gptq").model_copy(update={"runs_on": ["vllm"]}), model, Notices())


def check_reach(limit: int, model: Model) -> None:
    """Refuse a size below that of 4 bits for all linear weights."""
    losses = {
        name: dict.fromkeys((way.name for way in schemes_for(spec[1][1])), 0.0)
        for name, spec in linear_weights(model).items()
    }
    least = SchemeBudget(model, losses).least
    if limit < least:
        outside = sum(info.nbytes for name, info in model.checkpoint.tensors.items() if name not in losses)
        raise UserError(
            f"--target-bytes: {limit / 1e6:.4g} MB are out of reach: with 4 bits for all linear weights "
            f"{model.checkpoint.name} takes {least / 1e6:.4g} MB, {outside / 1e6:.4g} MB of them for the embedding and "
            "what else stays as it is; ask for more, or prune it first"
        )


def choose_for_bytes(options: QuantizeOptions, model: Model, samples: Samples, say: Notices) -> QuantizeRecipe:
    """Measure a model and return the recipe of `quantize` for a size."""
    limit = parse_size("bytes", str(options.target_bytes)).of(cost_of(model).bytes)
    check_reach(limit, model)
    with disk_failures(options.output):
        folder = Path(mkdtemp(prefix=f".{options.output.name}-", dir=options.output.absolute().parent))
    try:
        choice = SchemeBudgets(model, samples, options, folder, Journal(folder, "schemes")).schemes.at_bytes(limit)
    except BudgetError as error:
        raise UserError(f"--target-bytes: nothing has {limit / 1e6:.4g} MB: ask for more") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ways = ", ".join(f"{count} in {way}" for way, count in choice.counts.items())
    say(f"chosen for {choice.bytes / 1e6:.2f} MB: {ways}; predicted divergence (KL) {choice.kl:.3f}")
    return recipe_of(model, choice)
