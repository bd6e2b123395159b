"""What processes do in tests in place of loading a model. Imports nothing heavy: each of them starts a Python."""

import os
import signal
from threading import Event

from ckpt_prune.benchmarking.messages import Failure, Memory, Ready
from ckpt_prune.benchmarking.worker import serve

WAITS = os.environ.get("OMP_WAIT_POLICY", "actively")
"""As what is imported beside this module sees it, torch too."""


def obliging(connection, seat):
    """Ready at once; every timing takes as long as the model's name says."""
    connection.send(Ready("cpu", None))
    while connection.recv() is not None:
        connection.send({"forward": [float(seat.model)]})
    connection.send(Memory(1, 2, None))


def failing(connection, seat):
    connection.send(Failure("out of memory"))


def complaining(connection, seat):
    """Fails when it is timed, and is gone by the time it is timed again."""
    connection.send(Ready("cpu", None))
    connection.recv()
    connection.send(Failure("no room for the cache"))


def killed(connection, seat):
    connection.send(Ready("cpu", None))
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def crashing(connection, seat):
    os.kill(os.getpid(), signal.SIGABRT)


def leaving(connection, seat):
    os._exit(3)


def endless(connection, seat):
    """Never answers, and ignores the gentler signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send(Ready("cpu", None))
    Event().wait()


def serving_one(connection, seat):
    """Of two models the first is really loaded, and the other's process need not import what loads it."""
    if seat.label == "A":
        serve(connection, seat)
    else:
        waiting(connection, seat)


def waiting(connection, seat):
    """Never answers."""
    connection.send(Ready("cpu", None))
    Event().wait()


def answering_once(connection, seat):
    """Says so when it is timed for the second time, and never answers that."""
    connection.send(Ready("cpu", None))
    connection.recv()
    connection.send({"forward": [1.0]})
    connection.recv()
    print("at work", flush=True)
    Event().wait()


def telling_how_it_waits(connection, seat):
    """Its device is how OpenMP's threads were told to wait when this module was imported."""
    connection.send(Ready(WAITS, None))
