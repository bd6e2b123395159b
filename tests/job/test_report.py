"""The report's model: what it writes it reads, and files of other versions are read as well."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ckpt_prune.job.records import SiteRecord
from ckpt_prune.stages.report import Report
from tests.show.examples import (
    Json,
    elsewhere,
    layer,
    linear,
    make_kept_layer,
    make_learned_rotation,
    make_mask_report,
    recovery,
    report,
    site,
)

HEAD = {"head": 0, "error_uncompensated": 0.5, "error_compensated": 0.25, "floor": 0.1, "rho2": 0.5}
STAGES = [
    {"name": "blocks", "seconds": 1.25, "peak_bytes": 2**30, "device_peak_bytes": None},
    {"name": "publishing", "seconds": 0.5, "peak_bytes": 2**31, "device_peak_bytes": 7, "phases": {"ranking": 0.25}},
]
EARLIER = {"recovery": recovery(), "layers": [layer(0)]}
EXAMPLES = {
    "units": report([site(0), site(0, "heads", width=16), site(0, "qk", consumer=None, heads=[HEAD])]),
    "a search": report([site(0)], lambda_search={"chosen": 0.1, "perplexity": {"0.1": 5.5, "1": 6.25}}),
    "a size": report([site(0)], asked={"size": {"params": "70%"}, "digest": "cafe"}),
    "a mask": make_mask_report([linear(0), linear(1, "mlp.up_proj", error=None, damp=None, dead=None)]),
    "rotations": make_mask_report([linear(0)], make_learned_rotation(0), make_learned_rotation(1)),
    "recovery": report([site(0)], recovery=recovery(on_the_fly=True), layers=[layer(0), make_kept_layer(1)]),
    "twice": elsewhere([layer(0)], recovery=recovery(earlier=EARLIER)),
    "perplexities": elsewhere(
        [layer(0)],
        recovery=recovery(perplexity_after=[{"blocks": 0, "perplexity": 9.5}, {"blocks": 1, "perplexity": None}]),
    ),
    "stages": report([site(0)], stages=STAGES),
    "a loss": report([site(0)], loss={"of": "perplexity", "before": 2.0, "after": None, "kl": 0.5, "data": "window 8"}),
    "files": report([site(0)], files={"config.json": "ab"}),
}


def is_within(less: Any, more: Any) -> bool:
    """Whether everything in `less` stands in `more` too, of the same type."""
    if isinstance(less, dict):
        return isinstance(more, dict) and all(
            key in more and is_within(value, more[key]) for key, value in less.items()
        )
    if isinstance(less, list):
        return isinstance(more, list) and len(less) == len(more) and all(map(is_within, less, more))
    return type(less) is type(more) and less == more


@pytest.mark.parametrize("json_report", EXAMPLES.values(), ids=EXAMPLES)
def test_what_is_read_is_written(json_report):
    """Keys that were absent may be added, as null or empty; nothing is lost, no number becomes another."""
    written = Report.read(json_report).data()
    assert is_within(json_report, written)
    assert json.loads(json.dumps(written)) == written
    assert Report.read(written).data() == written


def test_the_recipe_is_as_it_was_used():
    """Key by key, in its order; what a recipe has not is not added."""
    json_report = report([])
    assert list(Report.read(json_report).data()["recipe"].items()) == list(json_report["recipe"].items())
    assert Report.read(elsewhere([], recipe={"name": "pruned elsewhere"})).data()["recipe"] == {
        "name": "pruned elsewhere"
    }


# ---- other versions --------------------------------------------------------------------------------------------

NEWER = {
    "the report": lambda json_report: json_report,
    "a site": lambda json_report: json_report["sites"][0],
    "a linear": lambda json_report: json_report["linears"][0],
    "a layer": lambda json_report: json_report["layers"][0],
    "the mask": lambda json_report: json_report["mask"],
    "the rotation": lambda json_report: json_report["rotation"],
    "a rotation": lambda json_report: json_report["rotation"]["learned"][0],
    "the container": lambda json_report: json_report["container"],
    "the cost": lambda json_report: json_report["before"],
    "the recovery": lambda json_report: json_report["recovery"],
    "a stage": lambda json_report: json_report["stages"][0],
}


def everything() -> Json:
    json_report = make_mask_report(
        [linear(0)], make_learned_rotation(0), recovery=recovery(), layers=[layer(0)], stages=STAGES
    )
    json_report["sites"] = [site(0)]
    return json.loads(json.dumps(json_report))


@pytest.mark.parametrize("place", NEWER.values(), ids=NEWER)
def test_a_key_of_a_newer_version_is_kept_in_reading_and_refused_in_making(place):
    json_report = everything()
    place(json_report)["later"] = {"more": [1]}
    read = Report.read(json_report)
    assert place(read.data())["later"] == {"more": [1]}
    with pytest.raises(ValidationError, match="unknown key 'later'"):
        Report.model_validate(json_report)


def test_another_version_of_the_format_is_not_read():
    with pytest.raises(ValidationError, match="version"):
        Report.read(report([], version=2))


# ---- numbers that are none -------------------------------------------------------------------------------------

NO_NUMBERS = ["0.5", True, [1.0], {}, float("nan"), float("inf"), 10**400, -1e301]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("key", ["rho2", "error_held_out", "k95", "width", "later"])
def test_what_is_no_finite_number_is_missing(key, value):
    assert SiteRecord.read(site(0, **{key: value})).figure(key) is None


TEXT = st.sampled_from(["", "block", "name", "kind", "blocks", "0.5"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(everything())), JSON_VALUES, max_size=4))
def test_a_damaged_report_is_refused_in_one_way(changes):
    """A report with any values under its keys is read, and written again, or refused with a validation error."""
    try:
        damaged = Report.read(everything() | changes)
    except ValidationError:
        return
    assert Report.read(damaged.data()).data() == damaged.data()
