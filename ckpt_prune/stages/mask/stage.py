"""The work of the stage `mask`: share the zeros out over blocks, and zero the weights of each."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.zero_patterns import describe_mask
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import PruneStep
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.model.model import Model
from ckpt_prune.stages.mask.keys import Mask
from ckpt_prune.stages.mask.masker import Masker, check_widths, masked_blocks
from ckpt_prune.stages.mask.records import MaskRecord, MaskShares
from ckpt_prune.stages.mask.shares import choose_shares
from ckpt_prune.stages.rotation.run import rotations_in_turn
from ckpt_prune.stages.shared.extremes import nothing_goes, ruined_line
from ckpt_prune.stages.shared.measure_dense import measure_dense
from ckpt_prune.stages.shared.moments import check_collected, prune_step
from ckpt_prune.stages.shared.one_basis import check_one_basis
from ckpt_prune.stages.shared.tokens import INPUTS, check_linears, widest_linear


class MaskStage(Stage[Mask]):
    """Puts zeros into every linear module of every block. Shapes stay as they are.

        version: 1
        name: half-zeros
        mask: {method: sparsegpt, pattern: "2:4"}

    In order: `check` refuses patterns that do not fit, `check_data` statistics where blocks must run. `run` measures.
    `before_blocks` shares the zeros out. `step` masks a block, by its `pruner` on the moments that `grams` asks for.
    `report` lists shares and errors.
    """

    of = Mask
    measured_words = INPUTS

    def check_source(self, model: Model) -> None:
        """Masks go into outputs with code of their own, unless their residual stream turns between blocks."""
        check_one_basis(model)
        check_linears(model, "masked")

    def check(self, prepared: Prepared) -> None:
        """Refuse a pattern that does not fit the weights, and statistics that lack what the method needs."""
        check_widths(prepared.model, self.keys)
        if self.keys.allocation == "divergence" and prepared.model.family.experts is not None:
            raise UserError(
                f"recipe {prepared.recipe.name} tries masks on whole blocks, whose experts may see none of a few "
                "samples: say mask.allocation=owl or alpha"
            )
        if prepared.statistics is not None:
            check_collected(prepared, prepared.statistics)

    def check_data(self, prepared: Prepared) -> None:
        """Refuse statistics where shares of zeros need samples to run the model on."""
        if self.keys.allocation == "divergence" and prepared.live is None:
            raise UserError(
                f"recipe {prepared.recipe.name} shares a mask's zeros out by their effect on the model: give "
                f"{DATA_OPTIONS[prepared.model.family.modality]} in place of --statistics"
            )

    def plan_lines(self, prepared: Prepared) -> list[str]:
        part = "linear weight" if self.keys.only is None else f"linear weight of the {self.keys.only}"
        where = f"of every {part} in every block"
        if self.keys.allocation != "uniform":
            where = f"of all {part.replace('weight', 'weights')}, shared out over blocks by {self.keys.allocation}"
        how = describe_mask(self.keys.method, self.keys.pattern)
        return [f"to be masked by {how}: {prepared.recipe.ratio:.1%} {where}"]

    def extreme_line(self, prepared: Prepared) -> str | None:
        if self.keys.groups is not None:  # an N:M pattern says how much
            return None
        ratio = prepared.recipe.ratio
        if not ratio and (line := nothing_goes(prepared.whole.recipe)):
            return line
        return ruined_line({"the weights": 1 - ratio}, "A ratio of 0.5 is")

    def messages(self, prepared: Prepared) -> list[str]:
        model = prepared.model
        unmasked = model.blocks - len(masked_blocks(model, self.keys.only))
        if not unmasked:
            return []
        return [
            f"the mask leaves {plural(unmasked, 'block')} as they are, which have none of the linear modules that are "
            "masked"
        ]

    def widest_fit(self, prepared: Prepared) -> int:
        return widest_linear(prepared) if self.keys.method == "sparsegpt" else 0

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return measure_dense(prepared, run)

    def before_blocks(self, prepared: Prepared, run: Run) -> Prepared:
        """Choose how many zeros each block gets, if that differs."""
        if self.keys.allocation == "uniform":
            return prepared

        def choose() -> MaskShares:
            with run.timer.time("shares"):
                return choose_shares(prepared, self.keys)

        return prepared.knowing(run.remember("shares", MaskShares, choose))

    def pruner(self, prepared: Prepared) -> Masker:
        shares = prepared.facts(MaskShares)
        return Masker(
            prepared.model,
            self.keys,
            prepared.recipe.ratio,
            self.keys.groups,
            prepared.output.container.biases,
            prepared.device,
            prepared.diagnostics is not False,
            None if shares is None else shares.ratios,
        )

    def grams(self, prepared: Prepared) -> dict[str, bool] | None:
        if not self.keys.reads_inputs:
            return None
        # Wanda needs norms, and Grams for the errors that the report states, if they are asked for.
        has_grams = bool(prepared.diagnostics) or self.keys.method == "sparsegpt"
        return dict.fromkeys(prepared.model.family.inputs, has_grams)

    def step(self, prepared: Prepared, run: Run) -> PruneStep:
        """Return what masks a block. Rotations that are learned in turn are learned on its stream."""
        step = prune_step(self.pruner(prepared), self.grams(prepared), prepared)
        rotations = rotations_in_turn(prepared)
        if rotations is None:
            return step
        rotations.stream = step.prefix(lambda: prepared.live_stream(prepared.view))
        return step

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        shares = prepared.facts(MaskShares)
        mask = MaskRecord(
            method=self.keys.method,
            pattern=self.keys.pattern,
            only=self.keys.only,
            ratio=prepared.recipe.ratio,
            allocation=None if shares is None else self.keys.allocation,
            shares=shares,
        )
        return {"mask": mask, "linears": list(records)}
