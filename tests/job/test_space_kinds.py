"""What recipes may say of a space, asked of every kind there is."""

from typing import get_args

import pytest

from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.compensation.methods import COLUMN_METHODS, ROTARY_METHODS
from ckpt_prune.job.space_kinds import FACTS, KINDS, SCORE_NAMES, SpaceSettings, kind_of
from ckpt_prune.model.spaces import BESIDE, ENDS, SPACES, Ends

SETTINGS = {
    ends: [
        SpaceSettings(score, method, target, by_error)
        for score in kind.scores
        for method in kind.methods
        for target in ("dense", "sequential", "drift")
        for by_error in (False, True)
    ]
    for ends, kind in KINDS.items()
}


def test_every_end_has_a_kind_and_every_space_an_end():
    assert set(KINDS) == set(get_args(Ends))
    assert set(ENDS) == set(SPACES)
    assert all(kind_of(space).methods == KINDS[ends].methods for space, ends in ENDS.items())


def test_units_that_stand_side_by_side_are_not_ranked_over_blocks():
    assert {space for space in ENDS if kind_of(space).unrankable} == BESIDE | {"experts"}


def test_kinds_that_share_the_name_of_a_compensation_agree_on_what_recipes_ask_of_it():
    assert set(FACTS) == set(COLUMN_METHODS) | set(LOGIT_METHODS) | set(ROTARY_METHODS)
    for kind in KINDS.values():
        for name, traits in kind.methods.items():
            own = (traits.needs_gram, traits.uses_strength, traits.adds_bias)
            assert own == (FACTS[name].needs_gram, FACTS[name].uses_strength, FACTS[name].adds_bias)


def test_score_names_are_those_of_all_kinds_once():
    assert sorted(SCORE_NAMES) == sorted({name for kind in KINDS.values() for name in kind.scores})


@pytest.mark.parametrize("ends", KINDS)
def test_what_a_kind_needs_follows_from_its_score_compensation_and_target(ends):
    kind = KINDS[ends]
    for settings in SETTINGS[ends]:
        score, traits = kind.scores[settings.score], kind.methods[settings.method]
        assert kind.needs_moments(settings) == (score.needs_moments or settings.method != "none")
        if ends in ("columns", "values"):
            assert (kind.gram_for(settings) is not None) == (
                score.needs_gram or traits.needs_gram or settings.target == "drift" or settings.by_error
            )
            told = {"taylor"} if settings.score in ("taylor1", "taylor2") else set()
            assert kind.collects(settings) == ({"gram"} if kind.gram_for(settings) else set()) | told
        elif ends == "experts":
            assert (kind.gram_for(settings), kind.collects(settings), kind.measures_more(settings)) == (
                None,
                set(),
                False,
            )
        else:
            assert kind.gram_for(settings) is None
            assert kind.collects(settings) == ({ends} if kind.needs_moments(settings) or settings.by_error else set())


def test_what_needs_a_gram_is_named_compensation_first():
    columns = KINDS["columns"]
    assert columns.gram_for(SpaceSettings("obs", "ridge", "drift", False)) == "compensation ridge"
    assert columns.gram_for(SpaceSettings("obs", "bias", "drift", False)) == "score obs"
    assert columns.gram_for(SpaceSettings("flap", "bias", "drift", False)) == "target drift"
    assert columns.gram_for(SpaceSettings("flap", "bias", "sequential", False)) is None
