"""Names that may have been meant."""

from ckpt_prune.common.similar_names import NEAR, did_you_mean, similar_names

FRUIT = ("apple", "Apples", "banana", "grape")


def test_the_nearest_name_is_suggested_first():
    assert similar_names("aple", FRUIT) == ["apple", "Apples"]
    assert similar_names("aple", FRUIT, most=1) == ["apple"]
    assert similar_names("cherry", FRUIT) == []


def test_capital_letters_do_not_matter():
    assert similar_names("APPLES", FRUIT, most=1) == ["Apples"]
    assert did_you_mean("Banane", FRUIT) == "did you mean 'banana'? "


def test_hints():
    assert did_you_mean("aple", FRUIT, most=2) == "did you mean 'apple' or 'Apples'? "
    assert did_you_mean("cherry", FRUIT) == ""
    assert did_you_mean("grand", FRUIT) == "did you mean 'grape'? "
    assert did_you_mean("grand", FRUIT, likeness=NEAR) == ""
