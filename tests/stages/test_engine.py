"""The engine asks for no more moments than it needs."""

import torch

from ckpt_prune.job.decisions import Decision, Decisions
from ckpt_prune.measure.moment_sources import NoMoments
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.stages.spaces.pruner import Pruner
from tests.families import recipe

CPU = torch.device("cpu")


class Asked(NoMoments):
    """Hands out nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def group_keys(self, keys):
        return [[key] for key in keys]

    def moments(self, block, tensors, keys):
        self.keys += keys
        return {}


def test_a_site_that_stays_whole_is_not_measured(dense):
    """Its scores are known. Where they are not, measuring is what they come from."""
    model = Model.open(dense.folder("llama"))
    wanted = recipe("none", "magnitude", heads=0.0, mlp=0.5)
    units = {space: model.units(space) for space in ("heads", "mlp")}
    known = {Site(0, "heads"): Decision(units["heads"], scores=torch.arange(units["heads"], dtype=torch.float64))}
    for decisions, expected in ((known, ["mlp"]), ({}, ["heads", "mlp"])):
        source = Asked()
        tensors, plans = Pruner(model, Decisions(wanted, decisions), frozenset(), CPU).block(
            0, model.read_block(0), source
        )
        assert source.keys == expected
        assert [(plan.space, len(plan.kept)) for plan in plans] == [
            ("heads", units["heads"]),
            ("mlp", units["mlp"] // 2),
        ]
        assert tensors["model.layers.0.mlp.down_proj.weight"].shape[1] == units["mlp"] // 2
