"""Every refusal of `refusals.yaml`: one line that names the remedy, exit code 2, and nothing on disk changes.

All rows share one folder, since a command that is refused changes nothing in it. What only other files bring about is
refused in the tests of its room.
"""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests import encoders, families
from tests.cli.running import TEXT, ok, read_refusal, read_usage_error
from tests.cli.test_parts import save
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.images import write_images, write_vit

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
ROWS = [pytest.param(row, id=f"{title} {place}") for title, rows in SECTIONS.items() for place, row in enumerate(rows)]
ENCODERS = {
    "bert": "bert-mlm",
    "dinov2": "dinov2-model",
    "opt": "opt",
    "opt-post-norm": "opt-350m-like",
    "opt-no-head": "opt-model",
}
"""Folder → variant of `tests.encoders`."""


@pytest.fixture(scope="module")
def folder(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `made` has, models of further families, a deeper llama, images, and statistics in four folds."""
    folder = tmp_path_factory.mktemp("refusals")
    shutil.copytree(made, folder, dirs_exist_ok=True)
    with quiet_transformers():
        for name, variant in ENCODERS.items():
            encoders.make(folder / name, variant)
        write_vit(folder / "vit")
        families.make(folder / "tied", "llama-gqa-tied")
        tiny_llama(max_position_embeddings=32, num_hidden_layers=6).save_pretrained(folder / "deep")
    tiny_tokenizer("<s> $A").save_pretrained(folder / "deep")
    write_images(folder / "images", [f"{number:02}.png" for number in range(12)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ok("calibrate", "dense", *TEXT, "--folds", "4", "-o", "weighed")
        for name in ("llava", "qwen2_5_vl"):
            save(name)
    return folder


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with those of changes in their places, dictionaries key by key."""
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = merge(merged[key], value) if isinstance(value, dict) and merged.get(key) else value
    return merged


@contextmanager
def prepared(row: Mapping[str, Any]) -> Iterator[None]:
    """Files as a row wants them, and afterwards as they were."""
    contents: dict[str, bytes | None] = dict.fromkeys(row.get("delete", ()))
    for name, content in row.get("write", {}).items():
        contents[name] = content if isinstance(content, bytes) else content.encode()
    for name, changes in row.get("edit", {}).items():
        contents[name] = json.dumps(merge(json.loads(Path(name).read_text()), changes)).encode()
    before = {name: Path(name).read_bytes() if Path(name).exists() else None for name in contents}
    put(contents)
    try:
        yield
    finally:
        put(before)


def put(contents: Mapping[str, bytes | None]) -> None:
    """Write files; those without content go, and folders that they leave empty."""
    for name, content in contents.items():
        path = Path(name)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif path.exists():
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


@pytest.mark.parametrize("row", ROWS)
def test_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, row: Mapping[str, Any]) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(row["run"].replace("$TEXT", shlex.join(TEXT)).replace("{here}", str(folder)))
    with prepared(row):
        message = (read_usage_error if row.get("usage") else read_refusal)(*words)
    expected = row["says"].replace("{here}", str(folder)).replace("{root}", str(ROOT))
    assert message == expected or (expected.endswith("…") and message.startswith(expected[:-1]))
