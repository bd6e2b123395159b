"""Texts by the names that papers call them."""

import gzip
import json
import logging
import sys
from pathlib import Path

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.files import DATA_VARIABLE
from ckpt_prune.datasets.texts import NamedText, parse_text_name
from ckpt_prune.measure.samples.text import read_text
from ckpt_prune.options.data import CalibrationOptions, EvaluationOptions
from ckpt_prune.options.option import check_options
from tests.cli.running import ok, read_refusal, run
from tests.hub_server import Hub, Repo
from tests.refusals import refusal
from tests.shared_data import shared_data

RAW = " \n = Title = \n \n One . \r\n\n"
ROWS = ["", " = Title = \n", "", " One . \n", ""]
"""As the Hub's wikitext-2-raw-v1 has those lines."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of local copies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DATA_VARIABLE, "data")
    for name, content in {
        "wikitext2/wiki.train.raw": RAW,
        "wikitext2/wiki.test.raw": RAW,
        "ptb/ptb.test.txt": " one \n two \n",
        "ptb/validation.jsonl": '{"sentence": "one"}\n{"sentence": "two"}\n',
    }.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    (tmp_path / "data/c4/en").mkdir(parents=True)
    lines = "".join(f"{json.dumps({'text': f'doc {n}'})}\n" for n in range(1200))
    (tmp_path / "data/c4/en/c4-validation.00000-of-00008.json.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wikitext2:train", " ".join(ROWS)),
        ("wikitext2:test", "\n\n".join(ROWS)),
        ("ptb:test", "one two"),
        ("ptb:validation", "one\n\ntwo"),
        ("c4:validation", " ".join(f"doc {n}" for n in range(1100))),
    ],
)
def test_rows_are_joined_as_the_papers_code_does(data, name, text):
    assert read_text([Path(name)]) == text


def test_what_a_name_says():
    assert parse_text_name(Path("wikitext2")) == NamedText("wikitext2", "test")
    assert parse_text_name(Path("wikitext2"), "train") == NamedText("wikitext2", "train")
    assert parse_text_name(Path("c4@2048")) == NamedText("c4", "validation", None, 2048)
    assert parse_text_name(Path("a/ptb:train@128")) == NamedText("ptb", "train", Path("a"), 128)
    assert parse_text_name(Path("wikitext2.txt")) is None


def test_a_file_of_that_name_goes_first(data):
    Path("c4").write_text("mine")
    assert read_text([Path("c4")]) == "mine"


def test_a_folder_before_the_name_is_looked_into(data, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE)
    for path in ("data/wikitext2:test", "data/wikitext2/wikitext2:test"):
        assert read_text([Path(path)]) == "\n\n".join(ROWS)
    with pytest.raises(UserError, match=r"^data/ptb:train: data has no ptb\.train\.txt or train\.jsonl or "):
        read_text([Path("data/ptb:train")])


def test_options_say_split_and_window():
    evaluation = check_options(EvaluationOptions, {"text": "c4@128"})
    assert (evaluation.text, evaluation.window) == ((Path("c4:validation"),), 128)
    calibration = check_options(CalibrationOptions, {"text": ["ptb", "x.txt"], "window": 64})
    assert (calibration.text, calibration.window) == ((Path("ptb:train"), Path("x.txt")), 64)
    with pytest.raises(UserError, match=r"^windows of 64 and 128 tokens are asked for$"):
        check_options(EvaluationOptions, {"text": "c4@128", "window": 64})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c4:test", "c4:test: c4 has the splits train, validation"),
        ("ptb@64", "ptb@64: presets of windows are @128 and @2048; use --window for others"),
    ],
)
def test_refusals(name, message):
    assert refusal(parse_text_name, Path(name)) == message


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("ptb/validation.jsonl", b'{"text": 1}\n', 'no string under "sentence"'),
        ("ptb/ptb.test.txt", b"\xff\xfe\n", "not UTF-8 text: save it as UTF-8"),
        ("c4/en/c4-validation.00000-of-00008.json.gz", b"plain", "Not a gzipped file (b'pl')"),
    ],
)
def test_damaged_copies(data, file, content, reason):
    path = Path("data", file)
    path.write_bytes(content)
    split = "test" if path.suffix == ".txt" else "validation"
    with pytest.raises(UserError) as caught:
        read_text([Path(f"{path.parts[1]}:{split}")])
    assert str(caught.value) == f"{path}: cannot be read as {path.parts[1]}: {reason}"


def test_commands_take_names(place, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(place / "copies"))
    (place / "copies/wikitext2").mkdir(parents=True)
    (place / "copies/wikitext2/wiki.test.raw").write_bytes((place / "calib.txt").read_bytes())
    result = json.loads(ok("evaluate", "dense", "--text", "wikitext2", "--window", "16", "--samples", "2", "--json"))
    assert (result["window"], result["windows"]) == (16, 2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert read_refusal("prune", "dense", "--text", "wikitext2", "-o", "out") == (
        f"wikitext2:train: no local copy ({place / 'copies'}), and Salesforce/wikitext/wikitext-2-raw-v1/"
        "train-00000-of-00001.parquet is not in the Hub cache, and HF_HUB_OFFLINE is set; run `hf download "
        "Salesforce/wikitext wikitext-2-raw-v1/train-00000-of-00001.parquet --repo-type dataset` while connected, or "
        "give a file"
    )


def test_a_hub_that_does_not_answer_is_one_line_and_one_error(place, hub: Hub, monkeypatch):
    """Its client tries six times and prints two lines each time, through a handler of its own."""
    waits: list[float] = []
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    dead = "http://127.0.0.1:1"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", dead)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", dead + "/{repo_id}/{filename}")
    handlers = list(logging.getLogger("huggingface_hub").handlers)
    result = run("prune", "dense", "--text", "wikitext2", "-o", "out")
    assert (result.exit_code, len(waits)) == (2, 5)
    first, error = result.stderr.splitlines()
    assert first == "the Hub does not answer: trying again for half a minute (HF_HUB_OFFLINE=1 does not ask it)"
    assert "and the Hub cannot be reached; run `hf download Salesforce/wikitext " in error
    assert logging.getLogger("huggingface_hub").handlers == handlers


def test_the_hub_has_what_no_folder_has(hub: Hub, monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    repo = hub.repos["datasets/allenai/c4"] = Repo(private=False)
    content = gzip.compress(b'{"text": "one"}\n{"text": "two"}\n')
    repo.commit({"en/c4-validation.00000-of-00008.json.gz": content}, "data")
    assert read_text([Path("c4:validation")]) == "one two"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the eval extra")
    from pyarrow import parquet

    file = tmp_path / "test-00000-of-00001.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b\n"]}), file)
    assert read_text([tmp_path / "wikitext2:test"]) == "a\n\nb\n"
    file.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"\.parquet: cannot be read as wikitext2: Parquet"):
        read_text([tmp_path / "wikitext2:test"])


def test_parquet_without_pyarrow(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what Python itself knows an absent package by
    Path("copies").mkdir()
    Path("copies/test-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert read_refusal("evaluate", "dense", "--text", "copies/wikitext2:test", "--window", "16") == (
        'copies/test-00000-of-00001.parquet: reading parquet needs pyarrow: pip install ".[eval]" in the checkout of '
        "ckpt-prune"
    )


def test_the_published_text():
    (folder,) = shared_data("text-wikitext2")
    text = read_text([folder / "wikitext2:test"])
    assert text.startswith("\n\n = Robert Boulter = \n\n\n\n\n Robert Boulter is an English film")
    assert len(text.split()) == 241_211  # as many as wiki.test.tokens has
