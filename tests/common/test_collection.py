"""When Python looks for garbage."""

import gc
import subprocess
import sys

from ckpt_prune.common.collection import without_collection


def test_nothing_is_collected_meanwhile_and_the_state_before_returns():
    assert gc.isenabled()
    with without_collection():
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


NODE = """
import gc, weakref
from ckpt_prune.common.collection import collection_of_new_objects

class Node:
    def __init__(self):
        self.itself = self  # only a collection frees it
"""
ONLY_NEW = """
old = weakref.ref(Node())
with collection_of_new_objects():
    new = weakref.ref(Node())
    gc.collect()
    assert new() is None
    assert old() is not None
gc.collect()
assert old() is None
assert gc.get_freeze_count() == 0
"""
FROZEN_BEFORE = """
gc.freeze()
count = gc.get_freeze_count()
with collection_of_new_objects():
    pass
assert gc.get_freeze_count() == count > 0
"""


def run_alone(code: str) -> None:
    """In a Python that has few objects: to look through those of torch takes a second."""
    done = subprocess.run([sys.executable, "-c", NODE + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_new_objects_are_collected():
    run_alone(ONLY_NEW)


def test_what_a_caller_has_frozen_stays_so():
    run_alone(FROZEN_BEFORE)
