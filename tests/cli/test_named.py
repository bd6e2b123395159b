"""Nothing that is named on a command line, in rows of data or in a model's folder is left out without a word."""

import json
from pathlib import Path

import pytest

import ckpt_prune
from tests.cli.running import TEXT, ok, read_json, read_refusal, run

MAGNITUDE = ("--recipe", "magnitude", "--ratio", "0.5")
SIDE = (
    *("LICENSE", "notes/about.txt", "notes/deeper/more.txt", "additional_chat_templates/tool_use.jinja"),
    *("processor_config.json", "1_Pooling/config.json"),
)
LEFT_OUT = {
    "pickled": ("pytorch_model.bin",),
    "code": ("handler.py",),
    "hidden": (".git/", ".gitattributes"),
    "weights that are not the model's": ("onnx/", "other.gguf"),
}


def test_contradictions_are_refused_and_repeated_flags_are_not(place):
    assert read_refusal("plan", "dense", "--diagnostics", "--statistics", "stats", "--no-diagnostics") == (
        "--diagnostics and --no-diagnostics contradict each other: give one of them"
    )
    assert read_refusal("prune", "dense", "--set", "a.b=1", "--set", "a.b=2", "-o", "out") == (
        "--set a.b is given more than once"
    )
    assert "parameters" in ok("inspect", "dense", "--json", "--json")


def test_values_with_commas_may_be_given_one_by_one(place):
    assert ok("inspect", "dense", "--ratio", "0.25", "--ratio", "0.5") == ok("inspect", "dense", "--ratio", "0.25,0.5")


def test_each_text_is_measured_by_itself(place):
    Path("other.txt").write_text("the dog ran far away and a cat sat on the mat then " * 20)
    alone = {
        text: json.loads(ok("evaluate", "pruned", "--against", "dense", "--text", text, *window(), "--json"))
        for text in ("calib.txt", "other.txt")
    }
    words = ("evaluate", "pruned", "--against", "dense", "--text", "calib.txt", "--text", "other.txt", *window())
    both = json.loads(ok(*words, "--json"))
    assert both.pop("texts") == [{"text": text, **figures} for text, figures in alone.items()]
    one, other = alone.values()
    assert one["windows"] == other["windows"] == 5  # so the tokens of all weigh both alike
    assert (both["windows"], both["tokens"]) == (10, 2 * one["tokens"])
    for name in ("nll", "kl", "top1_agreement"):
        assert both[name] == pytest.approx((one[name] + other[name]) / 2)
    assert both["against"]["nll"] == pytest.approx((one["against"]["nll"] + other["against"]["nll"]) / 2)
    rows = [line.split() for line in ok(*words).splitlines()[:4]]
    assert [row[0] for row in rows] == ["text", "calib.txt", "other.txt", "all"]
    assert [row[3] for row in rows[1:3]] == [f"{figures['perplexity']:.3f}" for figures in alone.values()]
    means = both["against"]["mean_perplexity"], both["mean_perplexity"]
    for mean, figures in zip(means, ([one["against"], other["against"]], [one, other]), strict=True):
        assert mean == pytest.approx((figures[0]["perplexity"] + figures[1]["perplexity"]) / 2)
    assert f"mean of the 2 perplexities: before {means[0]:.3f}, after {means[1]:.3f}" in ok(*words).splitlines()
    assert ckpt_prune.evaluate("dense", text=["calib.txt", "other.txt"], window=16, samples=5).data()["windows"] == 10


def window(samples: str = "5") -> tuple[str, ...]:
    return ("--window", "16", "--samples", samples)


def test_a_text_that_is_too_short_is_refused_before_the_others_are_measured(place, monkeypatch):
    from ckpt_prune.evaluation import texts

    monkeypatch.setattr(texts, "perplexity", lambda *_: pytest.fail("a text is measured"))
    Path("short.txt").write_text("the cat")
    message = read_refusal("evaluate", "dense", "--text", "calib.txt", "--text", "short.txt", "--window", "16")
    assert message.startswith("the text is too short for one window")


def test_the_report_has_the_figures_over_all_texts(place):
    Path("other.txt").write_text("the dog ran far away and a cat sat on the mat then " * 20)
    figures = json.loads(
        ok(
            "evaluate",
            "pruned",
            "--against",
            "dense",
            "--text",
            "calib.txt",
            "--text",
            "other.txt",
            *window(),
            "--json",
        )
    )
    loss = read_json("pruned/ckpt_prune.json")["loss"]
    assert (loss["before"], loss["after"]) == (figures["against"]["perplexity"], figures["perplexity"])
    assert loss["data"] == "calib.txt, other.txt, window 16, tokens 150"


def test_samples_are_dealt_to_all_texts_or_refused(place):
    assert read_refusal("prune", "dense", "--text", "calib.txt", "--text", "b.txt", "--samples", "1", "-o", "out") == (
        "--samples 1 takes no window of some of the 2 texts of --text"
    )
    Path("other.txt").write_text("the dog ran far away and a cat sat on the mat then " * 20)
    ok("calibrate", "dense", "--text", "calib.txt", "--text", "other.txt", *window("4"), "-o", "two")
    assert read_json("two/statistics.json")["texts"] == "2 of calib.txt, 2 of other.txt"


ROWS = {
    "text": ({"text": "the cat sat on a mat and then the dog ran far away " * 8, "label": 1, "id": "x"}, "label, id"),
    "conversation": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "the cat sat on a mat " * 8}], "name": "ann"},
                {"role": "assistant", "content": "the dog ran far away " * 8},
            ],
            "tools": [],
        },
        "messages.name, tools",
    ),
}


@pytest.mark.parametrize(("row", "unread"), ROWS.values(), ids=ROWS)
def test_keys_of_rows_that_are_not_read_are_named_once_for_each_file(place, row, unread):
    Path("dense/chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    for name in ("rows.jsonl", "more.jsonl"):
        Path(name).write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    texts = ("--text", "rows.jsonl", "--text", "more.jsonl", *window("4"))
    for command in (("evaluate", "dense"), ("prune", "dense", "--recipe", "ridge", "--ratio", "0.5", "-o", "out")):
        result = run(*command, *texts)
        assert result.exit_code == 0, result.output
        lines = [line for line in result.stderr.splitlines() if "not read" in line]
        assert lines == [
            f"{name}: keys of its rows that are not read: {unread}" for name in ("rows.jsonl", "more.jsonl")
        ]


def test_rows_of_which_every_key_is_read_are_told_nothing_of(place):
    Path("rows.jsonl").write_text(json.dumps({"text": ROWS["text"][0]["text"]}) + "\n")
    assert run("evaluate", "dense", "--text", "rows.jsonl", "--window", "16").stderr == ""


@pytest.fixture
def full(place: Path) -> Path:
    """The model's folder with files of all kinds."""
    for name in (*SIDE, *LEFT_OUT["pickled"], *LEFT_OUT["code"], ".gitattributes", ".git/HEAD", "other.gguf"):
        Path("dense", name).parent.mkdir(parents=True, exist_ok=True)
        Path("dense", name).write_text("{}")
    Path("dense/onnx").mkdir()
    Path("dense/onnx/model.onnx").write_text("graph")
    Path("dense/onnx/config.json").write_text("{}")
    return place


@pytest.mark.parametrize(
    ("words", "out"),
    [
        (("prune", "dense", *MAGNITUDE, "-o", "out"), "out"),
        (("quantize", "dense", "--format", "int8", "-o", "out"), "out"),
        (("recover", "pruned", "--dense", "dense", *TEXT, "--epochs", "1", "-o", "out"), None),
    ],
)
def test_side_files_travel_and_others_are_named(full, words, out):
    if out is None:  # of a model whose own folder has them
        ok("prune", "dense", *MAGNITUDE, "--overwrite", "-o", "pruned")
        Path("pruned/pytorch_model.bin").write_text("pickle")
    result = run(*words)
    assert result.exit_code == 0, result.output
    for name in SIDE:
        assert Path(out or "out", name).read_text() == "{}", name
    line = next(line for line in result.stderr.splitlines() if line.startswith("left out of the output: "))
    for reason, names in LEFT_OUT.items() if out else [("pickled", ("pytorch_model.bin",))]:
        assert f"{', '.join(names)} ({reason})" in line
    for name in [name for names in LEFT_OUT.values() for name in names]:
        assert not Path(out or "out", name).exists()


def test_an_output_with_deep_side_files_is_verified_and_replaced(full):
    ok("prune", "dense", *MAGNITUDE, "-o", "out")
    assert {*SIDE} <= {*read_json("out/ckpt_prune.json")["files"]}
    Path("out/notes/deeper/more.txt").write_text("edited")
    assert run("verify", "out").exit_code == 1
    ok("prune", "dense", *MAGNITUDE, "--overwrite", "-o", "out")
    assert Path("out/notes/deeper/more.txt").read_text() == "{}"
    ok("verify", "out")
    Path("out/notes/deeper/mine.txt").write_text("mine")
    assert read_refusal("prune", "dense", *MAGNITUDE, "--overwrite", "-o", "out").endswith(
        "out/notes/deeper/mine.txt was not written with the output that is there, and the new one needs its name; move "
        "it away or choose another output name"
    )
