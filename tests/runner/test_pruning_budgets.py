"""What budgets with fewer columns and tokens measure, and what they leave out."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.options.option import check_options
from ckpt_prune.runner.frontier.asked import _read_streams, words_of_rare_tokens
from ckpt_prune.runner.pruning_budgets import will_prune_columns
from ckpt_prune.runner.scheme_budgets import SchemeBudgets, check_reach
from ckpt_prune.runner.vocabularies import (
    LEAST_OF_FORESEEN,
    SmallerVocabulary,
    Vocabularies,
    least_share,
    tables_in_question,
)
from ckpt_prune.stages.vocabulary.keys import Vocabulary
from ckpt_prune.stages.vocabulary.settle import VocabularyChoice
from tests.runner.frontiers import fail, make_place


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("budgets"))
    given = {"model": place / "model", "text": place / "text.txt", "held_out": place / "held_out.txt"}
    options = check_options(FrontierOptions, given | {"output": place / "out", "samples": 8, "window": 48})
    return open_model(str(place / "model")), options


def test_one_pass_over_the_samples_predicts_columns_as_two_do(asked, tmp_path, monkeypatch):
    model, options = asked
    samples = choose_samples(model, options, say=Notices())
    found = []
    for narrower in (False, True):
        folder = tmp_path / str(narrower)
        folder.mkdir()
        budgets = SchemeBudgets(model, samples, options, folder, Journal(folder, "budgets"), narrower)
        assert budgets.has_grams == narrower
        if narrower:
            monkeypatch.setattr("ckpt_prune.runner.column_budgets.measure_statistics", fail)
        found.append((budgets.columns.losses, budgets.fitted.losses))
    assert found[0] == found[1]
    assert found[0][0].keys() == {0, 1}


def test_windows_without_the_tokens_that_went_are_told_of(asked):
    model, options = asked
    kept = VocabularyChoice(model, Vocabulary.model_validate({}), options).rows_of(1024)
    (stream,) = _read_streams(options, model)
    stay = torch.isin(stream, torch.tensor(kept))
    assert 0 < (~stay).sum() < len(stay) / 10
    for windows, told in ((stream[stay], True), (stream, False), (stream[~stay], False)):
        said = words_of_rare_tokens(options, model, kept, windows[None])
        assert len(said) == told
        assert all(re.search(r"have \d+\.\d\d% more tokens, .* measured 0\.00%: ", each) for each in said)
    assert words_of_rare_tokens(options, model, None, stream[stay][None]) == []


def test_all_tokens_may_be_asked_to_stay(asked, tmp_path):
    model, options = asked
    assert tables_in_question(model, options)
    whole = options.model_copy(update={"all_tokens": True})
    assert (tables_in_question(model, whole), least_share(model, whole)) == (frozenset(), 1)
    with pytest.raises(UserError, match="out of reach"):
        check_reach(200_000, model, whole)
    check_reach(200_000, model, options)
    found = [1.0]
    Vocabularies(model, whole, Journal(tmp_path, "whole")).add_choices(found, fail, float)
    assert found == [1.0]


def test_columns_are_expected_to_go_below_four_bits_a_weight(asked):
    model, _ = asked
    weights = sum(info.numel for info in model.checkpoint.tensors.values())
    assert will_prune_columns(model, weights // 2 - 1, None)
    assert not will_prune_columns(model, weights // 2, None)
    assert will_prune_columns(model, None, 0.2)
    assert not will_prune_columns(model, None, 0.05)


def test_tokens_of_a_model_with_code_of_its_own_are_not_in_question(asked):
    model, options = asked
    assert least_share(model, options) == Fraction(12, 100)
    coded = replace(model.checkpoint, config=model.checkpoint.config | {"auto_map": {"AutoConfig": "own.Config"}})
    assert not tables_in_question(replace(model, checkpoint=coded), options)
    assert least_share(replace(model, checkpoint=coded), options) == 1


def test_a_smaller_vocabulary_is_not_measured_if_it_cannot_help(asked, tmp_path, monkeypatch):
    """The first is; the next is asked for at half of what its further tokens cost at the price of the first."""
    model, options = asked
    vocabularies = Vocabularies(model, options, Journal(tmp_path, "vocabularies"))
    asked_for: list[SmallerVocabulary] = []

    def price(_self, kept):
        assert not vocabularies.priced, "the second is measured, too"
        return 0.5

    def solve(vocabulary):
        asked_for.append(vocabulary)
        return [vocabulary.lost]

    monkeypatch.setattr(VocabularyChoice, "price", price)
    monkeypatch.setattr(VocabularyChoice, "growth", lambda _self, stay: 4096 - 2 * len(stay))
    found = [0.6]
    vocabularies.add_choices(found, solve, lambda lost: lost)
    first, foreseen = asked_for
    assert found == [0.6, 0.5]
    assert (first.lost, len(first.kept), len(foreseen.kept)) == (0.5, 1536, 1024)
    assert foreseen.lost == pytest.approx(LEAST_OF_FORESEEN * 0.5 * 2048 / 1024)
    with pytest.raises(AssertionError, match="the second is measured, too"):
        vocabularies.add_choices([1e4], lambda each: [len(each.kept)], lambda tokens: tokens)
