"""Reports that are damaged where recovery is told."""

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.reporting.document import read_document

from .examples import Json, elsewhere, layer, recovery, write


def without(value: Json, key: str) -> Json:
    return {k: v for k, v in value.items() if k != key}


DAMAGE = {
    "no dense model": (elsewhere([], recovery=without(recovery(), "dense")), "recovery.dense: field required"),
    "a dense model without a name": (
        elsewhere([], recovery=recovery(dense={"fingerprint": "fade"})),
        "recovery.dense.name: field required",
    ),
    "settings are text": (
        elsewhere([], recovery=recovery(settings="fast")),
        "recovery.settings: input should be a valid dictionary or instance of Record",
    ),
    "no data": (elsewhere([], recovery=without(recovery(), "data")), "recovery.data: field required"),
    "neither during nor after": (
        elsewhere([], recovery=recovery(on_the_fly=None)),
        "recovery.on_the_fly: input should be a valid boolean",
    ),
    "a perplexity of nothing": (
        elsewhere([], recovery=recovery(perplexity_after=[{"blocks": 0}, {"perplexity": 9.0}])),
        "recovery.perplexity_after.1.blocks: field required",
    ),
    "fewer blocks than none": (
        elsewhere([], recovery=recovery(perplexity_after=[{"blocks": -1, "perplexity": 9.0}])),
        "recovery.perplexity_after.0.blocks: input should be greater than or equal to 0",
    ),
    "recovery is a list": (
        elsewhere([], recovery=[]),
        "recovery: input should be a valid dictionary or instance of Recovery",
    ),
    **{
        f"a layer without {key}": (elsewhere([layer(0), without(layer(1), key)]), f"layers.1.{key}: field required")
        for key in ("block", "epochs", "best_epoch", "diverged", "recovered")
    },
    "a layer below 0": (elsewhere([layer(-1)]), "layers.0.block: input should be greater than or equal to 0"),
    "epochs below 0": (
        elsewhere([layer(0, epochs=-1)]),
        "layers.0.epochs: input should be greater than or equal to 0",
    ),
}


@pytest.mark.parametrize(("value", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_recovery(tmp_path, value, reason):
    path = write(tmp_path / REPORT, value)
    with pytest.raises(UserError) as caught:
        read_document(path)
    assert str(caught.value) == f"{path} is damaged ({reason}): prune again"
