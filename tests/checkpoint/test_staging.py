"""What another kind of output than a checkpoint asks of its staging folder; the rest is tested through the writers."""

from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.errors import UserError

GRAPH = {"holds": "model.onnx", "what": "an exported folder", "resumable": False}


def staging(out: Path, *, resume: bool = False, overwrite: bool = False, **more: Any) -> Staging:
    return Staging(out, job="job", layout="layout", resume=resume, overwrite=overwrite, **more)


def refusal(out: Path, **more: Any) -> str:
    with pytest.raises(UserError) as error:
        staging(out, **more)
    return str(error.value)


def folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text(name)
    return path


@pytest.mark.parametrize(
    ("names", "more", "replaced"),
    [
        (("config.json", "model.safetensors"), {}, True),
        (("config.json", "model-00001-of-00002.safetensors"), {}, True),
        (("config.json", "model.onnx"), {}, False),
        (("config.json", "model.onnx"), GRAPH, True),
        (("config.json", "model.safetensors"), GRAPH, False),
        (("config.json", "other.onnx"), GRAPH, False),
        (("model.onnx",), GRAPH, False),
        (("config.json",), GRAPH, False),
    ],
)
def test_what_may_be_replaced(tmp_path, names, more, replaced):
    out = folder(tmp_path / "out", *names)
    if not replaced:
        what = more.get("what", "a checkpoint folder")
        for overwrite in (False, True):
            assert refusal(out, overwrite=overwrite, **more) == (
                f"{out} exists and is not {what}, so it is never replaced; choose another name"
            )
        return
    assert refusal(out, **more) == f"{out} exists; --overwrite replaces it"
    found = staging(out, overwrite=True, **more)
    found.start()
    (found.path / "new").write_text("new")
    assert {path.name for path in out.iterdir()} == set(names)
    found.publish()
    assert [path.name for path in out.iterdir()] == ["new"]


@pytest.mark.parametrize(("more", "ways"), [({}, "--resume continues it, "), (GRAPH, "")])
def test_what_can_be_done_about_an_unfinished_run(tmp_path, more, ways):
    killed = staging(tmp_path / "out", **more)
    killed.start()
    killed.release()
    assert refusal(tmp_path / "out", **more) == (
        f"{tmp_path / 'out.partial'} is left from an unfinished run; {ways}--overwrite starts afresh"
    )
    (tmp_path / "out.partial" / "rest").write_text("of the killed run")
    found = staging(tmp_path / "out", overwrite=True, **more)
    found.start()
    assert not (tmp_path / "out.partial" / "rest").exists()
    found.discard()
    assert not list(tmp_path.iterdir())


def test_a_new_folder_is_checked_again_before_it_is_filled(tmp_path):
    found = staging(tmp_path / "out", **GRAPH)
    folder(tmp_path / "out", "config.json", "model.onnx")
    with pytest.raises(UserError) as error:
        found.start()
    assert str(error.value) == f"{tmp_path / 'out'} exists; --overwrite replaces it"
    assert not (tmp_path / "out.partial").exists()
