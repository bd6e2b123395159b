"""Keys of recipes for spaces, tried with every kind there is."""

import pytest

from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.compensation.methods import COLUMN_METHODS, ROTARY_METHODS
from ckpt_prune.recipe.space_kinds import FACTS, KINDS, SpaceSettings

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


def test_kinds_that_share_the_name_of_a_compensation_agree_on_what_recipes_ask_of_it():
    assert set(FACTS) == set(COLUMN_METHODS) | set(LOGIT_METHODS) | set(ROTARY_METHODS)
    for kind in KINDS.values():
        for name, traits in kind.methods.items():
            facts = (traits.needs_gram, traits.uses_strength, traits.adds_bias)
            assert facts == (FACTS[name].needs_gram, FACTS[name].uses_strength, FACTS[name].adds_bias)


@pytest.mark.parametrize("ends", KINDS)
def test_what_a_kind_needs_follows_from_its_score_compensation_and_target(ends):
    kind = KINDS[ends]
    for settings in SETTINGS[ends]:
        score, traits = kind.scores[settings.score], kind.methods[settings.method]
        assert kind.needs_moments(settings) == (score.needs_moments or settings.method != "none")
        if ends in ("columns", "values", "pooling"):
            assert (kind.gram_for(settings) is not None) == (
                score.needs_gram or traits.needs_gram or settings.target == "drift" or settings.by_error
            )
            gradients = {"taylor"} if settings.score in ("taylor1", "taylor2") else set()
            assert kind.collects(settings) == ({"gram"} if kind.gram_for(settings) else set()) | gradients
        elif ends == "experts":
            assert (kind.gram_for(settings), kind.collects(settings), kind.measures_more(settings)) == (
                None,
                set(),
                False,
            )
        else:
            assert kind.gram_for(settings) is None
            assert kind.collects(settings) == ({ends} if kind.needs_moments(settings) or settings.by_error else set())
