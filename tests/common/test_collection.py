"""When Python looks for garbage."""

import gc
import weakref

import pytest

from ckpt_prune.common.collection import collection_of_new_objects, without_collection


class Node:
    """An object that holds itself, which only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thawed():
    """No object is frozen, whatever ran in this process before; afterwards as many as then."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_nothing_is_collected_meanwhile_and_the_state_before_returns():
    assert gc.isenabled()
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_only_new_objects_are_collected(thawed):
    gc.collect()
    old = weakref.ref(Node())
    with collection_of_new_objects():
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_what_a_caller_has_frozen_stays_so(thawed):
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collection_of_new_objects():
            pass
        assert gc.get_freeze_count() == count > 0
    finally:
        gc.unfreeze()
