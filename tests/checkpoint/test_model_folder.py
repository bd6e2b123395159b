import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from ckpt_prune.checkpoint.model_folder import check_output_folder, model_name, resolve_model
from ckpt_prune.common.errors import UserError
from tests.refusals import refusal


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def http(kind: type[errors.HfHubHTTPError]) -> Exception:
    # The HTTP library beneath the Hub client differs between its versions; the error only looks at these two.
    return kind("first line\nsecond line", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


NO_FOLDER = " does not exist; give an existing folder or a Hub id such as org/name"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "out/pruned-modell",
            "the folder out has no pruned-modell (did you mean out/pruned-model?); give an existing folder",
        ),
        *((name, name + NO_FOLDER) for name in ("/no/such/folder", "./org/name", "../name", "~/name", "org/name/")),
        ("", "the model's name is empty; give an existing folder or a Hub id such as org/name"),
        ("out/llama", "the folder out has no llama; give an existing folder"),
        ("out/prun", "the folder out has no prun (did you mean out/pruned-model?); give an existing folder"),
        (
            "./outt/pruned-model",
            "./outt/pruned-model does not exist (did you mean out/pruned-model?); give an existing",
        ),
        ("./outt", "./outt does not exist (did you mean out?); give an existing folder or a Hub id such as org/name"),
        ("out/pruned-model/", None),
        ("outs/", "outs/ does not exist (did you mean out?); give an existing folder or a Hub id such as org/name"),
        ("~/modles", "~/modles" + NO_FOLDER),
        ("~/models", "~/models does not exist (did you mean {here}/models?); give an existing folder or a Hub id such"),
        ("~nobody-here/m", "~nobody-here/m" + NO_FOLDER),
        ("b" * 300, "b" * 300 + NO_FOLDER),
        ("calib.txt/dense", "calib.txt is a file; give the folder that holds config.json"),
    ],
)
def test_what_is_mistyped_is_not_asked_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, message: str | None
) -> None:
    """Nor does it need the Hub's client; where a folder `out` is there, `out/name` is no Hub id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    refuse(monkeypatch, AssertionError("asked the Hub"))
    (tmp_path / "out" / "pruned-model").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "calib.txt").touch()
    if message is None:
        assert resolve_model(model) == Path(model)
        return
    assert refusal(resolve_model, model).startswith(message.format(here=tmp_path))


def test_a_name_that_the_hub_does_not_know_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`outt` may be a Hub id, as gpt2 is: the folder beside it is named once the Hub has answered."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    refuse(monkeypatch, http(errors.RepositoryNotFoundError))
    assert refusal(resolve_model, "outt") == (
        "outt is neither a folder nor a Hub repository you can read (did you mean out?); "
        "check the name, or run `hf auth login` if it is private"
    )


@pytest.mark.parametrize("given", ["org/name", "outs", "out/modell"])
def test_what_only_this_tool_writes_is_never_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "file").touch()
    meant = {"outs": " (did you mean out?)", "out/modell": " (did you mean out/model?)"}.get(given, "")
    with pytest.raises(UserError) as error:
        check_output_folder(Path(given))
    assert str(error.value) == f"{given} does not exist{meant}; give a folder that this tool wrote"
    assert check_output_folder(Path("out/model")) == Path("out/model")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json is a file; give the folder that holds config.json$"):
        resolve_model(str(tmp_path / "config.json"))


def test_only_data_files_of_the_top_level_and_of_modules_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests: list[dict[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        requests.append({**options, "model": model})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == tmp_path
    assert {request["model"] for request in requests} == {"org/name"}
    published = [
        "additional_chat_templates/tool_use.jinja",
        "config.json", "model.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja", "README.md",
        "1_Pooling/config.json", "2_Dense/model.safetensors",
        "pytorch_model.bin", "model.pt", "modeling.py", "consolidated.safetensors", "original/params.json", "model.h5",
        "0_Transformer/model.safetensors", "2_Dense/pytorch_model.bin", "1000/config.json", "1_a/b/config.json",
    ]  # fmt: skip
    filters = [{key: request[key] for key in ("allow_patterns", "ignore_patterns")} for request in requests]
    fetched = [{*huggingface_hub.utils.filter_repo_objects(published, **each)} for each in filters]
    assert fetched[0] == {"additional_chat_templates/tool_use.jinja", "config.json", "README.md"}
    assert set.union(*fetched) == {*published[:9]}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http(errors.GatedRepoError),
            "org/m is gated; ask for access on its page of the Hub and run `hf auth login`",
        ),
        (
            http(errors.RepositoryNotFoundError),
            "org/m is neither a folder nor a Hub repository you can read; "
            "check the name, or run `hf auth login` if it is private",
        ),
        (
            errors.LocalEntryNotFoundError("no\nnet"),
            "org/m is neither a folder nor in the Hub cache, and the Hub cannot be reached; "
            "give a folder, or run `hf download org/m` while connected",
        ),
        (OSError("disk\nfull"), "cannot download org/m from the Hub (disk: full); try again, or give a folder"),
        (TimeoutError(), "cannot download org/m from the Hub (TimeoutError); try again, or give a folder"),
    ],
)
def test_every_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    refuse(monkeypatch, error)
    assert refusal(resolve_model, "org/m") == message


def test_offline_and_not_cached(tmp_path: Path) -> None:
    """In a process of its own: the Hub client reads the variable when it is imported."""
    code = (
        "import socket\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from ckpt_prune.checkpoint.model_folder import resolve_model\n"
        "from ckpt_prune.common.errors import UserError\n"
        "try: resolve_model('org/never-cached')\n"
        "except UserError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == (
        "org/never-cached is neither a folder nor in the Hub cache, and HF_HUB_OFFLINE is set; "
        "give a folder, or run `hf download org/never-cached` while connected\n"
    )


def test_what_a_snapshot_is_called(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--my-model/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    assert model_name(snapshot) == "org/my-model"
    assert model_name(snapshot.parent) == "snapshots"
    (tmp_path / "link").symlink_to(snapshot)
    assert model_name(tmp_path / "link") == "org/my-model"
