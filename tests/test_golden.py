"""Golden hashes: each byte counts, and hashes of another machine are not compared by mistake."""

import json
from pathlib import Path

import pytest

from tools import golden

JOBS = ("--only", "magnitude/llama", "--only", "magnitude/opt")


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit code, and the last line that the script prints or ends with."""

    def call(*args: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["golden.py", *args])
        code: object = 0
        try:
            golden.main()
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out.splitlines()[-1] if isinstance(code, int) else ""

    return call


def test_what_differs_is_named(run, tmp_path):
    file = tmp_path / "hashes.json"
    assert run(str(file), *JOBS)[1].startswith("2 outputs with 93 hashes, 1 refusals; {'torch': ")
    assert run("--check", str(file), *JOBS) == (0, "all are the same")

    record = json.loads(file.read_text())
    assert list(record["hashes"]) == ["magnitude/llama", "magnitude/opt", "magnitude/opt container=any"]
    hashes, name = record["hashes"]["magnitude/llama"], "model.safetensors model.norm.weight"
    right = hashes[name]
    assert right.startswith("torch.float32 [64] ")
    hashes[name] = "torch.float32 [64] 00"
    record["hashes"]["magnitude/vit"] = record["hashes"]["ridge/llama"] = {}
    file.write_text(json.dumps(record))
    assert run("--check", str(file), *JOBS) == (1, f"magnitude/llama: {name}: torch.float32 [64] 00 -> {right}")
    code, output = run("--check", str(file), "--only", "ridge/llama")
    assert (code, output.split(": ")[:2]) == (1, ["ridge/llama", "model.safetensors model.norm.weight"])
    assert list(golden.differences({"a": {}, "b": {"x": "1"}}, {"b": {"y": "1"}, "c": {}})) == [
        "a: is no longer there",
        "b: x: 1 -> is no longer there",
        "b: y: was not there -> 1",
        "c: was not there",
    ]


def test_hashes_of_another_machine_are_compared_by_force_alone(run, tmp_path: Path):
    file = tmp_path / "hashes.json"
    file.write_text(json.dumps({"environment": golden.environment() | {"torch": "1.0"}, "hashes": {}}))
    code, _ = run("--check", str(file), *JOBS)
    assert isinstance(code, str)
    assert "'torch': '1.0'" in code
    assert code.endswith("compare by force (--force)")
    assert run("--check", str(file), "--force", "--only", "none/*") == (0, "all are the same")
