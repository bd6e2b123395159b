"""Work of processes in tests, in place of loading a model. It imports nothing heavy: each starts a Python."""

import os
import signal
from threading import Event

from ckpt_prune.benchmarking.participants import Loaded, Memory
from ckpt_prune.common.errors import UserError

WAITS = os.environ.get("OMP_WAIT_POLICY", "actively")
"""As what is imported beside this module sees it, torch too."""


def obliging(connection, participant):
    """Ready at once; every timing takes as long as the model's name says."""
    connection.send(Loaded("cpu", None))
    while connection.recv() is not None:
        connection.send({"forward": [float(participant.model)]})
    connection.send(Memory(1, 2, None))


def failing(connection, participant):
    connection.send(UserError("out of memory"))


def complaining(connection, participant):
    """Fails when it is timed, and is gone by the time it is timed again."""
    connection.send(Loaded("cpu", None))
    connection.recv()
    connection.send(UserError("no room for the cache"))


def kill_itself(connection, participant):
    connection.send(Loaded("cpu", None))
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def crashing(connection, participant):
    os.kill(os.getpid(), signal.SIGABRT)


def leaving(connection, participant):
    os._exit(3)


def endless(connection, participant):
    """Never answers, and ignores the gentler signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send(Loaded("cpu", None))
    Event().wait()


def waiting(connection, participant):
    """Never answers."""
    connection.send(Loaded("cpu", None))
    Event().wait()


def answering_once(connection, participant):
    """Says so when it is timed for the second time, and never answers that."""
    connection.send(Loaded("cpu", None))
    connection.recv()
    connection.send({"forward": [1.0]})
    connection.recv()
    print("at work", flush=True)
    Event().wait()


def telling_how_it_waits(connection, participant):
    """Give as device the wait policy of OpenMP's threads when this module was imported."""
    connection.send(Loaded(WAITS, None))
