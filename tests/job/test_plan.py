"""The plan of one site, as files have it."""

import json

from ckpt_prune.job.plan import SitePlan
from ckpt_prune.model.spaces import Site

VALUES = {
    **{"block": 1, "space": "mlp", "consumer": "down.weight", "units": 2, "kept": [0], "scores": [2.0, 1.0]},
    **{"method": "none"},
}


def test_a_site_of_an_expert_reads_back():
    plan = SitePlan.model_validate(VALUES | {"expert": 3})
    assert plan.site == Site(1, "mlp.3")
    assert SitePlan.model_validate_json(plan.model_dump_json()) == plan
    assert json.loads(plan.model_dump_json())["expert"] == 3
