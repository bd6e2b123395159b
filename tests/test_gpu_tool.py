"""`tools/gpu.py` without a GPU: what it plans, leaves out and isolates, and what it makes of outputs that differ."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools import gpu, gpu_blocks, gpu_models
from tools.gpu_running import RESERVE, Outcome, SkippedError, Step, Workers, attempt, run


def works(value: int = 1) -> dict[str, int]:
    return {"value": value}


def fails() -> None:
    raise ValueError("a first line\nand a second")


def cannot() -> None:
    raise SkippedError("not on this machine")


def step(name: str, **more: object) -> Step:
    return Step(name, f"{__name__}:{name}", **more)


def table(outcomes: list[Outcome]) -> list[tuple[str, str, str | None]]:
    return [(outcome.name, outcome.status, outcome.reason) for outcome in outcomes]


def test_a_step_that_fails_is_recorded_and_what_needs_it_is_skipped():
    steps = [
        step("works", arguments={"value": 3}),
        step("fails"),
        step("cannot", after=("works, cpu",)),
        Step("needs it", "nowhere:nothing", after=("fails, cpu",)),
        Step("lost", "nowhere:nothing"),
        step("works", device="cuda", skip="no GPU"),
    ]
    outcomes = list(run(steps, lambda task, seconds: attempt(task), until=math.inf))
    assert table(outcomes) == [
        ("works", "ok", None),
        ("fails", "failed", "ValueError: a first line"),
        ("cannot", "skipped", "not on this machine"),
        ("needs it", "skipped", "fails, cpu: did not come out"),
        ("lost", "failed", "ModuleNotFoundError: No module named 'nowhere'"),
        ("works", "skipped", "no GPU"),
    ]
    assert outcomes[0].values == {"value": 3}
    assert outcomes[0].rss_bytes > 2**20
    assert outcomes[0].seconds >= 0
    assert 'raise ValueError("a first line' in outcomes[1].traceback
    assert outcomes[5].data() == {"name": "works", "device": "cuda", "status": "skipped", "reason": "no GPU"}


def test_what_no_longer_fits_is_left_out_and_none_has_more_time_than_is_left():
    now, given = [0.0], []

    def do(task: Step, seconds: float) -> Outcome:
        given.append((task.name, seconds))
        now[0] += 30
        return Outcome(task.name, task.device, "ok")

    steps = [Step("a", "", most=40), Step("b", ""), Step("long", "", least=20), Step("short", "", least=1)]
    outcomes = list(run(steps, do, until=RESERVE + 70, clock=lambda: now[0]))
    assert given == [("a", 40), ("b", 40), ("short", 10)]
    assert table(outcomes)[2] == ("long", "left out", "10 s were left, and it takes 20 or more")


def test_a_process_that_dies_or_hangs_is_replaced(tmp_path):
    # Functions that import nothing: a process is there in a moment.
    works = Step("works", "builtins:dict", {"value": 1})
    with Workers(tmp_path / "log") as workers:
        before = workers.do(works, 86400)
        died = workers.do(Step("dies", "os:_exit", {"status": 3}), 86400)
        stopped = workers.do(Step("sleeps", "subprocess:run", {"args": ["sleep", "infinity"]}), 1)
        after = workers.do(works, 86400)
    assert table([before, died, stopped, after]) == [
        ("works", "ok", None),
        ("dies", "failed", "its process died (exit code 3)"),
        ("sleeps", "failed", "stopped after 1 s"),
        ("works", "ok", None),
    ]
    assert before.values == after.values == {"value": 1}
    assert (tmp_path / "log").read_text().splitlines()[:2] == ["== works, cpu", "== dies, cpu"]


@pytest.fixture
def steps(tmp_path) -> list[Step]:
    return gpu.plan(tmp_path, data=tmp_path, gpu=True, small=False)


def test_every_step_is_planned_once_after_what_it_needs(steps):
    labels = [task.label for task in steps]
    assert len(labels) == len(set(labels))
    for index, task in enumerate(steps):
        assert set(task.after) <= set(labels[:index])
        module, _, function = task.function.partition(":")
        assert hasattr({"tools.gpu_models": gpu_models, "tools.gpu_blocks": gpu_blocks}[module], function)
    outputs = [task.arguments["out"] for task in steps if "out" in task.arguments]
    assert len(outputs) == len(set(outputs))


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_differences_are_relative_to_the_largest_entry_and_name_what_cannot_be_compared(tmp_path):
    one, two = torch.tensor([4.0, 0.0, 1.0]), torch.tensor([4.0, 1.0, 0.0])
    a = save(tmp_path / "a", same=one, apart=one, wide=torch.ones(3), ours=one)
    b = save(tmp_path / "b", same=one, apart=two, wide=torch.ones(2), theirs=one)
    assert gpu_models.differences(a, b) == {
        "relative": 0.25,
        "of": "apart",
        "zeros": 2 / 6,
        "other_shape": ["wide"],
        "only_in_one": ["ours", "theirs"],
    }
    c = save(tmp_path / "c", same=torch.full((3,), float("nan")))
    assert str(gpu_models.differences(a, c)["relative"]) == "nan"
