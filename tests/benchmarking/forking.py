"""Processes of the benchmark that need not import what they need."""

import multiprocessing
import tempfile
from multiprocessing import forkserver

import pytest


def fork_what_has_imported(patch: pytest.MonkeyPatch) -> None:
    """Let them fork from a process that has imported torch and the models, once for all tests of a worker.

    `tests/benchmarking` has spawned ones, as there are for users.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckpt_prune.benchmarking.runners"])
    with pytest.MonkeyPatch.context() as elsewhere:
        # A test's own folder can be too deep for the path of a socket, which has 107 bytes.
        elsewhere.setattr(tempfile, "tempdir", None)
        forkserver.ensure_running()
    patch.setattr(multiprocessing, "get_context", lambda method: context)
