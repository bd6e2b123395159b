"""When Python looks for garbage, each time through all objects: torch and transformers alone make half a million."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: for work that makes many objects and keeps them, such as imports."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def collection_of_new_objects() -> Iterator[None]:
    """Look for garbage among objects that are made meanwhile, and pass over those that exist already."""
    if gc.get_freeze_count():  # by somebody who also thaws them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
