"""The keys of `spaces`: drops units of spaces in every block, and makes up for them in closed form.

Its keys stand at the top of a recipe (`recipe.recipe`).
"""

from collections.abc import Set

from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.runtimes import Change
from ckpt_prune.model.spaces import COUPLED, KIND_OF_SPACE, recipe_space
from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.recipe.space_kinds import CHOSEN, kind_of


class Spaces(StageKeys):
    """Units of spaces go; shapes get smaller."""

    key = "spaces"
    summary = "Spaces to prune, such as heads and mlp; others stay whole."

    @classmethod
    def pick(cls, recipe: Recipe) -> "Spaces | None":
        return cls() if recipe.spaces else None

    def leaves_experts(self, recipe: Recipe) -> bool:
        return recipe.spaces.keys() == {"experts"} and recipe.spaces["experts"].compensation.method == "none"

    def check_recipe(self, recipe: Recipe) -> None:
        for space, settings in recipe.spaces.items():
            kind, score, method = kind_of(space), settings.score, settings.compensation.method
            if score not in kind.scores:
                allowed = ", ".join(kind.scores)
                raise ValueError(f"spaces.{space}: score {score} does not rank its units; allowed here: {allowed}")
            if method not in kind.methods:
                allowed = ", ".join(kind.methods)
                raise ValueError(f"spaces.{space}: method {method} is not for this space; allowed here: {allowed}")
            if kind.needs_taylor(recipe.settings_of(space)) and recipe.target != "dense":
                raise ValueError(
                    f"spaces.{space}: score {score} is measured on the unpruned model, with a pass back through "
                    "all of it: say target: dense"
                )
        self._check_allocation(recipe)
        self._check_experts(recipe)
        self._check_drift(recipe)
        self._check_strengths(recipe)

    def _check_allocation(self, recipe: Recipe) -> None:
        for space in recipe.spaces:
            kind = kind_of(space)
            by_errors = recipe.allocation == "least-error" and not kind.by_errors
            if kind.unrankable is not None and (recipe.ranks_blocks or by_errors):
                raise ValueError(kind.unrankable)
        for space, settings in recipe.spaces.items():
            keep, score = settings.keep, settings.score
            if keep is not None and (settings.ratio is not None or recipe.allocation != "uniform"):
                other = "its ratio" if settings.ratio is not None else f"allocation {recipe.allocation}"
                raise ValueError(f"spaces.{space}: keep and {other} both say how much goes: leave one out")
            if keep is not None and len(set(keep)) > 1 and recipe.widths == "uniform":
                raise ValueError(
                    f"spaces.{space}: keep gives blocks widths of their own, which no stock model can load: say "
                    "widths: per_layer to accept remote code"
                )
            if recipe.ranks_blocks and not kind_of(space).scores_columns(score):
                raise ValueError(f"spaces.{space}: score {score} ranks units, and FLAP's rankings compare columns")
            if score == CHOSEN and recipe.allocation != "least-error":
                raise ValueError(
                    f"spaces.{space}: score {CHOSEN} is chosen by the errors of every width: say allocation: "
                    "least-error"
                )
        if recipe.ranks_blocks and recipe.widths == "uniform":
            raise ValueError(
                f"allocation {recipe.allocation} gives every block its own widths, which no stock model can load: "
                "say widths: per_layer to accept remote code, or allocation: uniform"
            )
        if recipe.ranks_blocks and recipe.target != "dense":
            raise ValueError(f"allocation {recipe.allocation} compares all blocks before any is pruned: target: dense")
        if recipe.layers is not None and recipe.allocation == recipe.widths == "uniform":
            raise ValueError(
                "layers leaves other blocks whole, so that blocks differ in width, which no stock model can load: say "
                "widths: per_layer to accept remote code"
            )

    def _check_experts(self, recipe: Recipe) -> None:
        if recipe.refits_experts and recipe.target == "dense":
            raise ValueError(
                "spaces.experts: those that stay are refitted on the tokens that reach them once others are gone: say "
                "target: sequential or drift"
            )
        if "experts" in recipe.spaces and "mlp" in map(recipe_space, recipe.spaces):
            raise ValueError("experts go whole or lose columns: for both, prune twice, whole experts first")

    def _check_drift(self, recipe: Recipe) -> None:
        for space, settings in recipe.spaces.items():
            if settings.compensation.shares is not None and recipe.target != "drift":
                raise ValueError(f"spaces.{space}: shares requires target: drift")
        if recipe.target != "drift" or recipe.true_sequential:
            return
        for pair in COUPLED:
            if all(space in recipe.spaces and KIND_OF_SPACE[space] != "logits" for space in pair):
                raise ValueError(
                    f"{' and '.join(pair)} end in one projection, and with true_sequential: false both would make "
                    "up for the same drift: leave true_sequential out"
                )

    def _check_strengths(self, recipe: Recipe) -> None:
        compensations = [settings.compensation for settings in recipe.spaces.values()]
        if len({fit.lambda_by for fit in compensations} & {"perplexity", "folds"}) > 1:
            raise ValueError("lambda_by must be the same in every space that has a grid")
        grids = {
            (tuple(fit.lambda_grid), fit.lambda_units)
            for fit in compensations
            if fit.lambda_grid and fit.lambda_by == "perplexity"
        }
        if len(grids) > 1:
            raise ValueError("lambda_by: perplexity chooses one value for the model: grids and units must agree")

    def changes(self, recipe: Recipe, spaces: Set[str]) -> Set[Change]:
        if recipe.container == "padded":
            return set()
        differ = recipe.widths == "per_layer"
        is_changed: dict[Change, bool] = {
            "widths": differ and bool(spaces & {"mlp", "shared", "experts"}),
            "heads": differ and bool(spaces & {"heads", "queries", "cross_heads", "linear_heads"}),
            "qk": "qk" in spaces,
            "rotary": "rotary" in spaces,
            "values": "values" in spaces,
        }
        return {change for change, has in is_changed.items() if has}

    def needs_moments(self, recipe: Recipe) -> bool:
        if recipe.allocation == "least-error":
            return True
        return any(kind_of(space).needs_moments(recipe.settings_of(space)) for space in recipe.spaces)

    def needs_folds(self, recipe: Recipe) -> bool:
        return any(settings.compensation.by_folds for settings in recipe.spaces.values())

    def collects(self, recipe: Recipe) -> set[Collect]:
        needed: set[Collect] = {"fisher"} if recipe.weighed_by_effect else set()
        for space in recipe.spaces:
            needed |= kind_of(space).collects(recipe.settings_of(space))
        return needed

    def needs_samples(self, recipe: Recipe) -> bool:
        return bool(recipe.perplexity_grid) or recipe.refits_experts

    def needs_text(self, recipe: Recipe) -> bool:
        return (
            bool({"taylor", "rotary"} & self.collects(recipe))
            or "experts" in recipe.spaces
            or bool(recipe.perplexity_grid)
        )

    def needs_own_code(self, recipe: Recipe) -> bool:
        return recipe.widths == "per_layer" or (
            recipe.container != "padded" and any(not kind_of(space).stock for space in recipe.spaces)
        )

    def measures_prefix(self, recipe: Recipe) -> bool:
        return True

    def measures_dense(self, recipe: Recipe) -> bool:
        return self.decides_widths(recipe)

    def decides_widths(self, recipe: Recipe) -> bool:
        return recipe.allocation == "least-error"
