"""The plan file: which units of which spaces stay, with scores and predicted errors."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.records import PlanFile, SiteRecord
from ckpt_prune.model.spaces import Site, SpaceName, expert_space
from ckpt_prune.recipe.recipe import AnyRecipe


class SitePlan(SiteRecord):
    """One space of one block, with the scores of all its units, to six significant digits. Reports have no scores."""

    space: SpaceName
    scores: list[float]

    @property
    def site(self) -> Site:
        return Site(self.block, expert_space(self.space, self.expert))


# Scores stand beside the units that they chose.
_KEYS = list(SiteRecord.model_fields)
_SITE_KEYS = [*_KEYS[: _KEYS.index("method")], "scores", *_KEYS[_KEYS.index("method") :]]


class Plan(PlanFile[AnyRecipe, SitePlan]):
    """All that `prune` needs to apply the same decisions again, to the same model."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [
            ("model_path", self.model_path),
            ("recipe", self.recipe.name),
            ("container", self.container),
            ("before", self.before),
            ("after", self.after),
            ("sites", len(self.sites)),
        ]

    @property
    def divergence(self) -> float | None:
        """Predicted divergence of the whole model: the sum over sites and gaps; None if one is not known."""
        gaps = [] if self.depth is None else self.depth.gaps
        divergences = [*(site.divergence for site in self.sites), *(gap.divergence for gap in gaps)]
        return None if None in divergences else sum(value for value in divergences if value is not None)

    def to_json(self) -> str:
        """Readable JSON, with one line for every site."""
        data = self.model_dump(mode="json", by_alias=True)
        sites = data.pop("sites")
        if self.depth is None:
            del data["depth"]
        head = json.dumps(data, indent=2).removesuffix("\n}")
        lines = ",\n".join("    " + json.dumps({key: site[key] for key in _SITE_KEYS if key in site}) for site in sites)
        return f'{head},\n  "sites": [\n{lines}\n  ]\n}}\n'

    @property
    def digest(self) -> str:
        """sha256 of the plan's JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def read_plan(path: Path) -> Plan:
    """Read a plan file. A file that is no plan, or whose recipe was edited, is refused."""
    try:
        plan = Plan.model_validate(parse_json_object(read_input(path)))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, ValidationError) as error:
        raise UserError(f"{path} is not a plan: plans are written by `ckpt-prune plan`") from error
    if plan.recipe.digest != plan.recipe_digest:
        raise UserError(f"{path}: the recipe inside does not match its digest: plan again instead of editing it")
    return plan
