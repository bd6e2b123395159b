"""Processes that are started end with the one that started them, also if that is killed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ckpt_prune.common.child_process import python_command, safe_environment
from tests.forked import begin, posix, wait_gone

pytestmark = posix
WAITING = """
import os, sys
os.write(int(sys.argv[1]), b"!")
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_has_started_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The input that it waits for never ends, for this process holds it open."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "waiting_module.py").write_text(WAITING)
    monkeypatch.syspath_prepend(str(code))
    told, tell = os.pipe()
    given, give = os.pipe()

    def work() -> None:
        os.close(give)
        command = python_command("waiting_module", str(tell))
        process = subprocess.Popen(command, stdin=given, env=safe_environment(), cwd=tmp_path, pass_fds=[tell])
        os.write(tell, f"{process.pid} ".encode())
        process.wait()

    parent = begin(work, tmp_path)
    os.close(tell)
    said = b""
    while not {*b" !"} <= {*said}:  # in whatever order
        more = os.read(told, 100)
        assert more, parent.ended().stderr
        said += more
    started = int(said.replace(b"!", b""))
    os.kill(started, 0)
    parent.send(number)
    assert parent.ended().returncode == -number
    wait_gone(started)
    assert os.read(told, 100) == b""
    for descriptor in (told, given, give):
        os.close(descriptor)


def test_a_process_whose_parent_ended_before_it_began_ends_at_once(tmp_path: Path) -> None:
    told, tell = os.pipe()
    command = python_command("json.tool").copy()
    command[-1] = (
        command[-1].replace(f"end_with({os.getpid()})", "end_with(1000000000)") + f"; import os; os.write({tell}, b'!')"
    )
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=safe_environment(), cwd=tmp_path, pass_fds=[tell]
    )
    os.close(tell)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    os.close(told)
