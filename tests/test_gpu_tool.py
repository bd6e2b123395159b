"""`tools/gpu.py` without a GPU: what it plans, leaves out and isolates, and what it makes of outputs that differ."""

import json
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


def test_both_devices_get_the_same_work(steps):
    for name in ("embedded: best", "embedded: recover", "vit-tiny-imagenet: corp", "llama-pycode-16m: calibrate"):
        cpu, cuda = (next(task for task in steps if task.label == f"{name}, {device}") for device in ("cpu", "cuda"))
        differ = {key for key, value in cpu.arguments.items() if cuda.arguments[key] != value}
        assert differ == {"device", "out"} | ({"statistics"} if "corp" in name else set())
        compared = next(task for task in steps if task.name == f"{name} compared")
        assert compared.after == (cpu.label, cuda.label)
        assert compared.arguments["cpu"] == cpu.arguments["out"]
        assert compared.arguments["cuda"] == cuda.arguments["out"]


def test_steps_that_are_asked_for_bring_what_they_need(steps):
    assert [task.label for task in gpu.choose_steps("vit-tiny-imagenet: corp, cuda", steps)] == [
        "vit-tiny-imagenet: calibrate, cuda",
        "vit-tiny-imagenet: corp, cuda",
    ]
    assert gpu.choose_steps(None, steps) == steps


def test_without_a_gpu_or_data_the_rest_is_skipped_for_that_reason(tmp_path):
    all_steps = gpu.plan(tmp_path, data=None, gpu=False, small=True)
    assert {task.skip for task in all_steps if task.device == "cuda"} <= {gpu.NO_GPU, gpu.NO_DATA}
    runnable = [task for task in all_steps if task.skip is None]
    assert {task.name.split(":")[0] for task in runnable} == {
        "texts",
        "embedded",
        "7B layer at a tenth of the width",
        "70B layer at a tenth of the width",
    }
    assert all(task.arguments["cuda"] is None for task in runnable if task.name.endswith("compared"))


def test_the_record_holds_every_step_and_its_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        gpu, "plan", lambda work, **options: [step("works"), step("fails"), Step("needs one", "", skip=gpu.NO_GPU)]
    )
    monkeypatch.setattr(Workers, "do", lambda self, task, seconds: attempt(task))
    out = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(out), "--limit", "100"])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 1
    record = json.loads(out.read_text())
    assert record["environment"]["torch"] == torch.__version__
    assert [(entry["name"], entry["status"]) for entry in record["steps"]] == [
        ("environment", "ok"),
        ("works", "ok"),
        ("fails", "failed"),
        ("needs one", "skipped"),
    ]
    printed = capsys.readouterr().out
    assert "ValueError: a first line" in printed
    assert f"1 more steps skipped: {gpu.NO_GPU}" in printed
    assert f"2 ok, 1 failed, 1 skipped, 0 left out; all of it is in {out}" in printed


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


def test_the_stages_of_a_layer_make_up_for_what_is_dropped():
    size = {"outputs": 16, "inputs": 48, "device": "cpu"}
    assert gpu_blocks.moments(**size)["tokens"] == 96
    assert gpu_blocks.obs(**size, per_unit=4)["rising"]
    for method in ("ridge", "rotation"):
        errors = gpu_blocks.refit(**size, method=method)
        assert 0 < errors["error"] < errors["uncompensated"] < 1
    assert gpu_blocks.choice(**size)["chosen"] in gpu_blocks.CANDIDATES
    assert [gpu_blocks.mask(**size, method=method_name)["kept"] for method_name in ("wanda", "sparsegpt")] == [0.5, 0.5]
