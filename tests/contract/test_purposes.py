"""Classes of causal families that transformers has beside the language model: bases, and heads of texts and tokens."""

import pytest
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import ckpt_prune
from ckpt_prune.model.descriptions import known_families, load_family
from ckpt_prune.verification.verify import verify

from .dense import Dense, spaces_recipe
from .models import Case
from .whole import Whole, assert_same_outputs, outputs

PADDED = '{"pad_token_id": 39}'
"""A classifier reads several texts at once by it."""
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


def list_other_classes() -> list[Case]:
    """Every class that no description states; families begin with different ones."""
    cases = []
    for turn, model_type in enumerate(name for name in known_families() if load_family(name).has_causal):
        family = load_family(model_type)
        classes = [name for name in family.classes if name not in family.architectures]
        first = turn % max(1, len(classes))
        cases += [Case(model_type, name, settings=PADDED) for name in classes[first:] + classes[:first]]
    return cases


@pytest.mark.parametrize("auto", TASKS)
def test_every_class_that_transformers_loads_is_known(auto: str) -> None:
    mapping, count = getattr(transformers, auto)._model_mapping, 0
    for family in (load_family(name) for name in known_families()):
        stock = mapping.get(CONFIG_MAPPING[family.model_type], None) if family.has_causal else None
        if isinstance(stock, type):
            assert family.of(stock.__name__).purpose == TASKS[auto]
            count += 1
    assert count > 20


CHOSEN = list({case.model_type: case for case in reversed(list_other_classes())}.values())[::4]
"""One class of every fourth family: the blocks of all are held against whole models in `test_pruning.py`."""


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_equals_a_whole_model_pruned_by_hand(dense: Dense, case: Case, tmp_path) -> None:
    """The head stays as it is to the bit, and stock transformers loads the output."""
    methods = {space: "none" if space == "qk" else "ridge" for space in case.ratios}
    out = tmp_path / "out"
    dense.prune(case, spaces_recipe(case, methods), out)
    by_hand = Whole(case).prune(case.samples(), methods)
    other = case.samples(6, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(out), other), outputs(by_hand.model, other), 5e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (dense.folder(case), out))
    heads = [name for name in before if name.startswith(("score.", "classifier."))]
    assert bool(heads) == (case.family.auto_class != "AutoModel")
    assert all(before[name].equal(after[name]) for name in heads)
    assert all(check.passed is not False for check in verify(out, dense.folder(case)))
