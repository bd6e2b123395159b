"""A few of the faults that `tools/faults.py` injects by the thousand, of every kind one; and what it found."""

import signal

import pytest

from ckpt_prune.checkpoint.journal import JOURNAL
from ckpt_prune.common.check import run_check
from tests.faults.campaign import Case, faults_of
from tests.faults.jobs import JOBS
from tests.faults.shim import DISTURBED, ERRORS, FULL, GROWS, SIGNALS, TORN, Fault, Operation
from tests.faults.trial import Machine
from tests.forked import posix
from tests.pairs import every

pytestmark = posix

QUICK = ("sequential", "calibrate-again", "again", "plan")
"""Jobs that touch files in every way there is: journal, shards, side files, swap, what is kept of an old folder."""
RESUMABLE = [name for name, job in JOBS.items() if job.resumable and not job.graph]
KINDS = [*SIGNALS, *ERRORS, *TORN, FULL]


@pytest.mark.parametrize(("job", "what"), every(4, [(QUICK[i % len(QUICK)], what) for i, what in enumerate(KINDS)]))
def test_a_fault_where_files_change(machine: Machine, job: str, what: str) -> None:
    """In the middle of what such faults are possible at: another place for each kind."""
    seen = machine.reference(job).seen
    kinds = GROWS | {"sync", "rename"}
    places = [at for at, operation in enumerate(seen, 1) if operation.what in kinds and what in faults_of(operation)]
    share = (KINDS.index(what) + 1) / (len(KINDS) + 1)
    assert Case(job, Fault(places[int(share * len(places))], what)).run(machine) == []


@pytest.mark.parametrize("job", every(4, RESUMABLE))
def test_a_job_that_is_killed_half_way_goes_on_to_the_same_bytes(machine: Machine, job: str) -> None:
    """Every command that can be resumed, at the record in the middle of its journal."""
    records = places_of(machine, job, "rename", f"{JOURNAL}.tmp")
    assert Case(job, Fault(records[len(records) // 2], "SIGKILL")).run(machine) == []


@pytest.mark.parametrize("how", DISTURBED)
def test_an_input_that_changes_meanwhile(machine: Machine, how: str) -> None:
    seen = machine.reference("sequential").seen
    weights = [at for at, operation in enumerate(seen, 1) if operation.path.endswith("dense/model.safetensors")]
    at = weights[len(weights) // 2]
    assert Case("sequential", Fault(at, how, "dense/model.safetensors")).run(machine) == []
    assert Case("calibrate", Fault(at, how, "dense/tokenizer.json")).run(machine) == []


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_at_any_time(machine: Machine, name: str) -> None:
    at = len(machine.reference("masks").seen) // 2
    assert machine.struck_from("masks", getattr(signal, name), at, "resume") == []


# ---- what was found ------------------------------------------------------------------------------------------------


def places_of(machine: Machine, job: str, what: str, ending: str) -> list[int]:
    """List the operations of a job on files whose names end so."""
    seen = machine.reference(job).seen
    return [at for at, operation in enumerate(seen, 1) if operation.what == what and operation.path.endswith(ending)]


@pytest.mark.parametrize("job", every(3, ["plan", "recipe", "report"]))
def test_a_file_that_was_half_written_is_taken_over_by_the_next_run(machine: Machine, job: str) -> None:
    """It used to stay for ever in a hidden folder whose name no message gave."""
    [write] = places_of(machine, job, "write", "ckpt_prune-partial")
    for at in (write, write + 1, write + 2):
        assert Case(job, Fault(at, "SIGKILL")).run(machine) == []
    assert Case(job, Fault(write, "torn-SIGKILL")).run(machine) == []
    assert Case(job, Fault(write, FULL)).run(machine) == []


@pytest.mark.parametrize("what", ["EIO", "EACCES"])
def test_a_staging_folder_that_cannot_be_locked_goes_again(machine: Machine, what: str) -> None:
    """It stayed, empty, and nothing in it said whose it was."""
    at = places_of(machine, "calibrate", "open", ".out.partial")[0]
    assert Case("calibrate", Fault(at, what)).run(machine) == []


@pytest.mark.parametrize(("job", "ending"), [("calibrate", ".out.partial"), ("again", "out.partial")])
def test_a_signal_just_before_the_folder_gets_its_name(machine: Machine, job: str, ending: str) -> None:
    """Statistics stayed in a hidden folder, and an old output away from its place."""
    [at] = places_of(machine, job, "rename", ending)
    assert Case(job, Fault(at, "SIGTERM")).run(machine) == []


def test_a_tokenizer_that_vanishes_while_calibrating_is_an_error(machine: Machine) -> None:
    """The fingerprint in the statistics was of files that nobody had read."""
    seen = machine.reference("calibrate").seen
    blocks = [
        at for at, operation in enumerate(seen, 1) if operation.what == "create" and "block-00000" in operation.path
    ]
    assert Case("calibrate", Fault(blocks[0], "deleted", "dense/tokenizer_config.json")).run(machine) == []


def test_a_side_file_that_changes_while_it_is_copied_is_an_error(machine: Machine) -> None:
    """The output had a tokenizer that was looked at before, and was another by then."""
    name = "dense/tokenizer_config.json"
    at = places_of(machine, "dense", "open", name)[-1]
    assert Case("dense", Fault(at, "rewritten", name)).run(machine) == []


def test_statistics_that_vanish_while_they_are_read_are_a_line(machine: Machine) -> None:
    name = "stats/block-00000.safetensors"
    seen = machine.reference("plan").seen
    at = max(at for at, operation in enumerate(seen, 1) if operation.path.endswith("stats/statistics.json")) + 1
    assert Case("plan", Fault(at, "deleted", name)).run(machine) == []


def test_a_weight_that_cannot_be_read_while_numbers_are_tried_is_an_error(machine: Machine) -> None:
    """The number was taken for one that leaves no model of the size, and another one was chosen in silence."""
    at = places_of(machine, "narrow", "open", "measured/whole/block-00001.safetensors")[-1] + 1
    assert machine.reference("narrow").seen[at - 1].path.endswith("dense/model.safetensors")
    assert Case("narrow", Fault(at, "EACCES"), "overwrite").run(machine) == []


@pytest.mark.parametrize("what", every(2, ["SIGKILL", "SIGTERM", "SIGINT", "torn-SIGKILL", "ENOSPC", "EACCES"]))
def test_an_output_has_no_name_before_its_gguf_file_is_written(machine: Machine, what: str) -> None:
    """It stood there, complete by its record, and --resume had another thing to do than to finish it."""
    break_export(machine, "gguf-recipe", "out.partial/.model-f32.gguf", what)


def test_an_output_has_no_name_before_its_graph_is_written(machine: Machine) -> None:
    break_export(machine, "graph", "out.partial/onnx", "SIGKILL")


def break_export(machine: Machine, job: str, place: str, what: str) -> None:
    """Begin, middle and end of what is exported."""
    seen = machine.reference(job).seen
    places = [at for at, operation in enumerate(seen, 1) if place in operation.path]
    assert {seen[at - 1].what for at in places} >= {"create", "write", "rename"}
    ours = [at for at in places if what in faults_of(seen[at - 1])]
    for at in {ours[0], ours[len(ours) // 2], ours[-1]}:
        assert Case(job, Fault(at, what)).run(machine) == []


def test_every_operation_has_a_fault_that_changes_nothing_when_it_does_not_come(machine: Machine) -> None:
    """The machine itself: without a fault a job ends well, and a wrong file is seen."""
    assert machine.faulty("plan", Fault(10**6, "EIO"), "overwrite") == []
    kinds = {operation.what for name in QUICK for operation in machine.reference(name).seen}
    assert {"open", "create", "write", "sync", "mkdir", "rename", "remove", "claim"} <= kinds
    assert set(QUICK) <= set(JOBS)
    assert FULL in faults_of(Operation("write", ""))


def test_ctrl_c_counts_from_the_first_line_of_the_tool_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine itself: one that comes while click is entered is Python's to tell, as one is while that starts."""
    job, place = JOBS["plan"], machine.place("plan")

    def stops() -> tuple[bool, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.faults.trial.main", lambda *_: stops())
    assert machine.run("plan", place, job.arguments).code == 128 + signal.SIGINT
    monkeypatch.setattr("tests.faults.trial.main", lambda *_: run_check("a check", stops))
    assert machine.run("plan", place, job.arguments).code == 1
