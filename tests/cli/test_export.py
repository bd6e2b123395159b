"""`export`: what it says, what it leaves, and what it refuses."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_prune.cli.proof import describe_continuation, graph_lines
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.onnx import export as exporting
from ckpt_prune.onnx.records import Continuation, Metric, Validation
from tests.cli.running import edit_weights, listing, ok, poison, read_json, read_refusal, run
from tests.graphs import trace_as_commands_do, traced_before
from tests.onnx_graphs.exports import make_exports

VISION, DECODER = "deit-teacher", "llama-gqa-tied"
FILES = ["README.md", "ckpt_prune_onnx.json", "config.json", "model.onnx"]
VISION_FILES = [*FILES, "preprocessor_config.json"]
OUTPUTS = ("logits", "cls_logits", "distillation_logits")
TABLE = [
    "onnxruntime - PyTorch max abs mean abs max rel mean rel top-1",
    *(
        f"{output}: {batch} image{'s' if batch > 1 else ''} ~ ~ ~ ~ 100.00% ok"
        for batch in (1, 2, 5)
        for output in OUTPUTS
    ),
]
NOISE = [
    "metric: not measured on noise: give --images",
    "compared on: normal noise for pixels, no --images being given",
]
AGREES = "the graph agrees with vision (fp32, cpu, tolerance 0.0001 of the largest output)"


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    export = make_exports(tmp_path_factory)
    return {name: export(name) for name in (VISION, DECODER)}


@pytest.fixture
def vision(graphs, tmp_path, monkeypatch) -> Path:
    """A working folder with the model `vision`, whose graph is traced already."""
    return _place(graphs[VISION], "vision", tmp_path, monkeypatch)


@pytest.fixture
def decoder(graphs, tmp_path, monkeypatch) -> Path:
    """The same with `decoder`, and text.txt."""
    (tmp_path / "text.txt").write_text("the cat sat on a mat and then the dog ran far away " * 10)
    return _place(graphs[DECODER], "decoder", tmp_path, monkeypatch)


def _place(model_and_graph: tuple[Path, Path], name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model, graph = model_and_graph
    shutil.copytree(model, place / name)
    monkeypatch.chdir(place)
    traced_before(monkeypatch, graph)
    return place


def without_figures(text: str) -> list[str]:
    """Its lines, differences as ~ and columns one blank apart."""
    return [re.sub(r"\d\.\de[-+]\d\d", "~", " ".join(line.split())) for line in text.splitlines()]


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def size(folder: str) -> str:
    return human_bytes((Path(folder) / "model.onnx").stat().st_size)


# ---- what it says --------------------------------------------------------------------------------------------------


def test_a_model_is_traced_compared_and_written(graphs, tmp_path, monkeypatch):
    """Once with nothing left out: every other test takes the graph that is there."""
    shutil.copytree(graphs[VISION][0], tmp_path / "vision")
    monkeypatch.chdir(tmp_path)
    with trace_as_commands_do():
        stdout = ok("export", "vision", "-o", "out")
    end = f"image-classification, fp32, opset 20, {size('out')}: written to out"
    assert without_figures(stdout) == [*TABLE, *NOISE, AGREES, end]
    assert files("out") == sorted([*VISION_FILES, "validation.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "vision"]
    assert "FAILED" not in ok("verify", "out", "--against", "vision")
    # The graph is the one that the library writes.
    assert Path("out/model.onnx").read_bytes() == (graphs[VISION][1] / "model.onnx").read_bytes()


def test_outside_the_tolerance_nothing_is_written(vision):
    before = listing()
    result = run("export", "vision", "-o", "out", "--tolerance", "1e-12")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = without_figures(result.stdout)
    assert lines[: len(TABLE)] == [line.replace(" ok", " FAILED") for line in TABLE]
    where = r"[a-z_]+: \d images?: row \d, unit \d is \S+, in PyTorch \S+; the largest is \S+"
    cases = lines[len(TABLE) : 2 * len(TABLE) - 1]
    assert all(re.fullmatch(where, line) for line in cases)
    assert lines[2 * len(TABLE) - 1 :] == [
        "outputs FAILED: 9 of 9 outputs are outside the tolerance of 1e-12",
        *NOISE,
        "the graph does NOT agree with vision (fp32, cpu, tolerance 1e-12 of the largest output)",
        "the graph does not compute what the model does: nothing is written to out",
    ]
    assert listing() == before
    result = run("export", "vision", "-o", "out", "--tolerance", "1e-12", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    assert [report[key] for key in ("written", "out", "bytes", "manifest")] == [False, "out", {}, None]
    assert report["validation"]["passed"] is False
    assert listing() == before


def test_a_graph_of_other_weights_is_not_written(vision):
    """A graph is compared with what the checkpoint computes, and is not written if other weights were traced."""
    edit_weights("vision", poison("cls_classifier.bias", 5.0))
    before = listing()
    result = run("export", "vision", "-o", "out")
    assert result.exit_code == 1
    lines = without_figures(result.stdout)
    assert lines[1].endswith("FAILED")
    assert any(line.startswith("cls_logits: 1 image: row 0, unit 0 is ") for line in lines)
    assert listing() == before


def test_overwrite_keeps_the_old_graph_until_the_new_one_passes(vision):
    ok("export", "vision", "-o", "out", "--no-validate")
    Path("out/note.txt").write_text("mine")
    (graph,) = json.loads(ok("inspect", "out", "--json"))["graphs"]
    assert (graph["bytes"], graph["proven"]) == (Path("out/model.onnx").stat().st_size, None)
    assert (
        read_refusal("export", "vision", "-o", "out")
        == f"{Path.cwd() / 'out'} exists; --overwrite replaces it, or give another -o"
    )
    before = listing()
    # A graph that fails does not cost the one that is there.
    assert run("export", "vision", "-o", "out", "--overwrite", "--tolerance", "1e-12").exit_code == 1
    assert listing() == before
    ok("export", "vision", "-o", "out", "--overwrite")
    assert files("out") == sorted([*VISION_FILES, "validation.json", "note.txt"])


# ---- fewer bits ----------------------------------------------------------------------------------------------------


ROUNDED = ("--dtype", "int8", "--dtype", "int4", "--text", "text.txt", "--window", "32", "--samples", "4")


def test_a_rounded_graph_that_loses_much_has_one_verdict():
    metric = Metric(
        name="perplexity", onnxruntime=421.0, pytorch=414.0, of="4 windows of 256 tokens", difference=0.016, kl=0.06,
        same=0.787, tolerance=0.1, passed=True, windows=4,
    )  # fmt: skip
    about = {"dtype": "int4", "provider": "cpu", "max_loss": 0.1, "passed": True, "against": SimpleNamespace(name="m")}
    none: dict[str, list[Any]] = {key: [] for key in ("cases", "checks", "continuations")}
    lines = graph_lines(Validation.model_construct(**about, **none, note=None, data={}, metrics=[metric]))
    assert [line for line in lines if "the graph " in line or "the output " in line] == [
        "the graph keeps to what is allowed (int4, cpu, 10% of the metric may be lost), and still the output is worse "
        "than m by its first choices: perplexity 421 for 414, KL 0.0600 nats, the same first choice 78.7%, by 4 "
        "windows, too few to decide"
    ]


def test_several_types_share_the_trace_and_lie_side_by_side(decoder):
    lines = ok("export", "decoder", "-o", "out", *ROUNDED, "--max-loss", "50%", "--dense", "decoder").splitlines()
    graphs = ["model_int8.onnx", "model_q4.onnx"]
    other_files = {*FILES, "genai_config.json", "generation_config.json", "validation.json"}
    other_files |= {"tokenizer.json", "tokenizer_config.json"}
    other_files -= {"model.onnx"}
    assert files("out") == sorted([*other_files, *graphs])
    assert [line for line in lines if line.endswith(".onnx:")] == [f"{name}:" for name in graphs]
    assert not [line for line in lines if "FAILED" in line or line.startswith("logits")]
    number = r"(\d+\.\d{3})"
    alike = r"-?\d+\.\d\d% lost, KL \d\.\d{4}, \d+\.\d% of the predictions the same"
    for of in ("", " of decoder"):
        pattern = f"perplexity {number} in onnxruntime, {number} in PyTorch{of} \\(4 windows of 32 tokens\\): {alike}"
        assert len([line for line in lines if re.fullmatch(pattern, line)]) == 2, lines
    assert len([line for line in lines if line.startswith("an example, not a check: after ")]) == 2
    weights = [line for line in lines if line.startswith("weights: ")]
    padded = ["of 32, 1 with padded last blocks", "of 32, 11 with padded last blocks"]
    assert weights == [
        f"weights: 1 in 8-bit blocks, 10 in int8 ({padded[0]}, rounded to the nearest)",
        f"weights: 11 in 4-bit blocks ({padded[1]}, rounded to the nearest)",
    ]
    picked = r"chosen on text.txt: \d+ windows? of 32 tokens: KL \S+, and about 0.41 is allowed; "
    assert sum(re.match(picked, line) is not None for line in lines) == 2  # ln 1.5
    record = read_json("out/ckpt_prune_onnx.json")
    assert [graph["file"] for graph in record["graphs"]] == graphs
    assert [graph["dtype"] for graph in record["graphs"]] == ["int8", "int4"]
    validation = read_json("out/validation.json")
    assert [(graph["max_loss"], graph["tolerance"]) for graph in validation["graphs"]] == [(0.5, None)] * 2
    for graph in validation["graphs"]:
        metric, dense = graph["metrics"]
        assert (metric["against"], dense["against"], dense["tolerance"]) == (None, "decoder", None)
        assert metric["difference"] == pytest.approx(metric["onnxruntime"] / metric["pytorch"] - 1, rel=1e-3, abs=1e-6)
    assert ok("verify", "out").count(" ok\n") == 10
    shown = re.sub(" +", " ", ok("inspect", "out"))
    assert re.search(
        r"^folder out\nholds 2 ONNX graphs, \S+ KB; no checkpoint\nfor text-generation, with cache\n"
        r"made from decoder \([0-9a-f]{12}\), by ckpt_prune \S+\ncompared on text.txt\n\n.*\n"
        r"model_int8.onnx int8 20 \S+ KB 1 in 8-bit blocks of 32, 10 in int8 yes\n"
        r"model_q4.onnx int4 20 \S+ KB 11 in 4-bit blocks of 32 yes\n$",
        shown,
    )
    ratio = "out holds ONNX graphs: --ratio asks for the checkpoint they were made from"
    assert read_refusal("inspect", "out", "--ratio", "0.2") == ratio
    again = ok("validate", "out", "--against", "decoder", *ROUNDED[4:], "--max-loss", "0.5").splitlines()
    assert [line for line in again if line.startswith("perplexity")] == [
        line for line in lines if line.startswith("perplexity") and " of decoder " not in line
    ]


def test_a_graph_that_loses_more_than_is_allowed_is_not_written(decoder):
    """A model that holds all tokens alike is better than this random one."""
    shutil.copytree("decoder", "flat")
    edit_weights("flat", lambda tensors: tensors["model.norm.weight"].zero_())
    before = listing()
    result = run("export", "decoder", "-o", "out", *ROUNDED[2:], "--dense", "flat", "--max-loss-dense", "10%")
    assert (result.exit_code, result.stderr) == (1, "")
    assert re.search(
        r"^perplexity [\d.]+ in onnxruntime, 40.000 in PyTorch of flat .* FAILED$", result.stdout, re.MULTILINE
    )
    assert result.stdout.splitlines()[-1] == "the graph loses more than is allowed: nothing is written to out"
    assert listing() == before


# ---- what it refuses -----------------------------------------------------------------------------------------------


@pytest.fixture
def untraced(monkeypatch):
    """Nothing is loaded or traced before the input is checked."""

    def fail_on_load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(exporting, "load_model", fail_on_load)


def test_a_text_for_a_model_of_images_is_looked_for_first(vision, untraced):
    assert read_refusal("export", "vision", "-o", "out", "--text", "nowhere.txt").startswith("nowhere.txt")


def test_a_weight_that_is_missing_is_refused(vision):
    edit_weights("vision", lambda tensors: tensors.pop("deit.layernorm.weight"))
    assert read_refusal("export", "vision", "-o", "out") == (
        "vision: tensors are missing or of the wrong shape: deit.layernorm.weight; "
        "run `ckpt-prune verify vision` for all of them"
    )


def test_weights_that_are_no_numbers_do_not_pass(vision):
    """They go into the graph, and the comparison fails: NaN does not count as a small difference."""
    edit_weights("vision", poison("cls_classifier.bias"))
    before = listing()
    result = run("export", "vision", "-o", "out")
    assert result.exit_code == 1
    assert "logits: 1 image: row 0, unit 0 is " in result.stdout
    assert "the model is damaged, or overflows in float32" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("nothing is written to out")
    assert listing() == before


@pytest.mark.parametrize(
    ("pytorch", "same", "end"),
    [("b c", 2, ", as PyTorch does"), ("d c", 0, ", PyTorch 'd c' (other words from token 1 of 2 on)")],
)
def test_a_continued_text_is_called_an_example(pytorch, same, end):
    """It is no verdict: a graph that agrees may choose other words from the first token on."""
    continuation = Continuation(prompt="a", onnxruntime="b c", pytorch=pytorch, tokens=2, same=same)
    sentence = describe_continuation(continuation)
    assert sentence == f"an example, not a check: after 'a' onnxruntime writes 'b c'{end}"
