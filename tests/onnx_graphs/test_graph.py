"""Names, types and axes of a graph, what stands in its file beside that, and graphs that cannot be made."""

import logging
import sys
import warnings
from io import StringIO
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from transformers.models.vit.modeling_vit import ViTMLP

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx.export import GraphWriter
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.onnx.tracing import _capture, trace_model
from ckpt_prune.options.graphs import GraphSettings
from tests.forked import posix, run_forked
from tests.graphs import Exported, graph_of, trace_as_commands_do
from tests.once import run_folder
from tests.pairs import choose_cases

from .exports import graphs, make_exports

BATCH, SEQUENCE, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
IDS = ("input_ids", "int64", [BATCH, SEQUENCE])
KINDS = [("input_ids", "int64", [BATCH, SEQUENCE]), ("attention_mask", "int64", [BATCH, SEQUENCE])]
SENTENCES = ("token_type_ids", "int64", [BATCH, SEQUENCE])
PIXELS = ("pixel_values", "float32", [BATCH, 3, 12, 12])


def past(heads: list[int], kind: str = "float32", widths: tuple[int, int] = (4, 4)) -> list[Any]:
    return [
        (f"past_key_values.{layer}.{name}", kind, [BATCH, count, PAST, width])
        for layer, count in enumerate(heads)
        for name, width in zip(("key", "value"), widths, strict=True)
    ]


def present(heads: list[int], kind: str = "float32", widths: tuple[int, int] = (4, 4)) -> list[Any]:
    return [
        (name.replace("past_key_values", "present"), kind, [batch, count, TOTAL, width])
        for name, _, (batch, count, _, width) in past(heads, kind, widths)
    ]


def decoder(kind: str = "float32") -> list[Any]:
    return [IDS, ("attention_mask", "int64", [BATCH, TOTAL]), ("position_ids", "int64", [BATCH, SEQUENCE])]


def logits(kind: str = "float32") -> Any:
    return ("logits", kind, [BATCH, SEQUENCE, 40])


PUBLIC: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "llama-gqa-tied": ({}, decoder() + past([2, 2]), [logits(), *present([2, 2])]),
    "uneven-llama": ({}, decoder() + past([2, 1]), [logits(), *present([2, 1])]),
    "narrow-opt": ({}, decoder() + past([3], widths=(2, 4)), [logits(), *present([3], widths=(2, 4))]),
    "opt": (
        {"dtype": "fp16"},
        decoder() + past([4], "float16"),
        [logits("float16"), *present([4], "float16")],
    ),
    "rotated-llama": (
        {"cache": False, "opset": 18},
        [*KINDS, ("position_ids", "int64", [BATCH, SEQUENCE])],
        [logits()],
    ),
    "bert-mlm": ({}, [*KINDS, SENTENCES], [logits()]),
    "bert-two-heads": (
        {},
        [*KINDS, SENTENCES],
        [
            ("prediction_logits", "float32", [BATCH, SEQUENCE, 40]),
            ("seq_relationship_logits", "float32", [BATCH, 2]),
        ],
    ),
    "bert-model": (
        {},
        [*KINDS, SENTENCES],
        [("last_hidden_state", "float32", [BATCH, SEQUENCE, 16]), ("pooler_output", "float32", [BATCH, 16])],
    ),
    "vit": (
        {"optimize": "cuda", "opset": 18, "task": "feature-extraction"},
        [PIXELS],
        [("last_hidden_state", "float32", [BATCH, 10, 16])],
    ),
    "deit-teacher": (
        {},
        [PIXELS],
        [(name, "float32", [BATCH, 7]) for name in ("logits", "cls_logits", "distillation_logits")],
    ),
    "dinov2-model": (
        {},
        [PIXELS],
        [("last_hidden_state", "float32", [BATCH, 10, 16]), ("pooler_output", "float32", [BATCH, 16])],
    ),
}
"""Model → settings, inputs and outputs: those of the Hub's graphs, in the order of the forward."""
TRACED = ("llama-gqa-tied", "uneven-llama", "narrow-opt", "bert-mlm", "deit-teacher", "dinov2-model")
"""Those that other tests trace every time; the others with `--thorough`."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    return make_exports(tmp_path_factory)


def read(values: Any) -> list[Any]:
    ports = []
    for value in values:
        kind = value.type.tensor_type
        shape = [axis.dim_param or axis.dim_value for axis in kind.shape.dim]
        ports.append((value.name, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name, shape))
    return ports


@pytest.mark.parametrize("name", choose_cases(PUBLIC, TRACED.__contains__))
def test_inputs_and_outputs_have_the_names_and_axes_of_the_hub(exported, name):
    settings, inputs, outputs = PUBLIC[name]
    graph = onnx.load(graph_of(exported(name, **settings)[1])).graph
    assert read(graph.input) == inputs
    assert read(graph.output) == outputs


@pytest.mark.parametrize("name", choose_cases(PUBLIC, TRACED.__contains__))
def test_nothing_of_this_machine_is_in_the_file(exported, name, tmp_path_factory):
    """No stack traces, no paths, no shapes inside in the tracer's symbols."""
    _, folder = exported(name, **PUBLIC[name][0])
    data = graph_of(folder).read_bytes()
    for word in (
        b".py",
        b"site-packages",
        b"stack_trace",
        b"forward",
        b"File ",
        b"/tmp",
        b"/dev/shm",
        b"/home",
        b"/root",
    ):
        assert word not in data, word
    for path in (Path.home(), Path.cwd(), Path(torch.__file__).parent, run_folder(tmp_path_factory)):
        assert str(path).encode() not in data
    stated = onnx.load(graph_of(folder))
    assert (stated.producer_name, stated.doc_string, list(stated.metadata_props)) == ("ckpt_prune", "", [])
    for node in stated.graph.node:
        assert not node.doc_string
        assert not node.metadata_props
    weights = {initializer.name for initializer in stated.graph.initializer}
    shaped = {value.name for value in stated.graph.value_info if value.type.tensor_type.HasField("shape")}
    assert shaped <= weights


def test_two_exports_of_a_model_are_the_same_bytes(exported, tmp_path):
    model, folder = exported("dinov2-model")
    with trace_as_commands_do():
        GraphWriter(Checkpoint.open(model), tmp_path / "again", GraphSettings()).write()
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


# ---- what cannot be exported ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    return graphs.make(tmp_path_factory.mktemp("model") / "vit", "vit")


def refusal(model: Path, out: Path, **settings: Any) -> str:
    """The one line of an export that fails; nothing but a log is left."""
    with pytest.raises(UserError) as error, trace_as_commands_do():
        GraphWriter(Checkpoint.open(model), out, GraphSettings(**settings)).write()
    assert {path.name for path in out.parent.iterdir()} <= {f"{out.name}.export-error.log"}
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_that_computes_with_a_fixed_batch_is_refused(vit, tmp_path, monkeypatch):
    original = ViTMLP.forward
    monkeypatch.setattr(ViTMLP, "forward", lambda self, x: original(self, x) + torch.zeros(2, 1, 1))
    assert refusal(vit, tmp_path / "out") == (
        "pixel_values of the exported graph has shape ['2', '3', '12', '12'], where axes [0] should be dynamic: the "
        "model computes with a fixed size there"
    )


def depending_on_data(original: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        return original(self, x + 1 if x.sum() > 0 else x)

    return forward


def test_a_model_that_branches_on_what_it_reads_leaves_a_log(vit, tmp_path, monkeypatch):
    monkeypatch.setattr(ViTMLP, "forward", depending_on_data(ViTMLP.forward))
    before = [(logger.handlers[:], logger.propagate) for logger in map(logging.getLogger, ("torch", "transformers"))]
    message = refusal(vit, tmp_path / "out")
    log = tmp_path / "out.export-error.log"
    assert message.startswith(
        "ViTForImageClassification cannot be exported: GuardOnDataDependentSymNode: Could not guard"
    )
    assert message.endswith(f" (all that was said is in {log})")
    assert len(message) < 500 + len(str(log))
    text = log.read_text()
    assert "Traceback (most recent call last):" in text
    assert "in depending_on_data" in text or "in forward" in text
    assert "GuardOnDataDependentSymNode" in text
    assert [
        (logger.handlers, logger.propagate) for logger in map(logging.getLogger, ("torch", "transformers"))
    ] == before


@posix
def test_a_failed_trace_is_one_line_on_the_terminal(vit, tmp_path, monkeypatch):
    """Whoever writes there: click's runner would not see what is written past Python."""
    monkeypatch.setattr(ViTMLP, "forward", depending_on_data(ViTMLP.forward))
    done = run_forked(lambda: main(["export", str(vit), "-o", "out", "--no-validate"]), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out.export-error.log"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ViTForImageClassification cannot be exported: ")


def test_an_opset_that_the_exporter_does_not_write_is_refused(vit, tmp_path):
    from ckpt_prune.evaluation.whole_model import load_model

    task = GraphTask("image-classification", "image", False)
    model = load_model(vit, device="cpu")
    with pytest.raises(UserError) as error, trace_as_commands_do():
        trace_model(model, task, opset=26, fusions=None, log=tmp_path / "log")
    assert str(error.value) == (
        "ViTForImageClassification cannot be written in opset 26: the exporter kept 18; leave out --opset, or say that "
        "one"
    )
    assert not list(tmp_path.iterdir())


def test_what_is_said_meanwhile_is_kept_from_the_terminal(capsys):
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "transformers")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    output = StringIO()

    def fail() -> None:
        print("printed")
        print("to the error stream", file=sys.stderr)
        warnings.warn("a warning", stacklevel=1)
        for logger in loggers:
            logger.error("logged by %s", logger.name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), _capture(output):
        fail()
    text = output.getvalue()
    for part in ("printed", "to the error stream", *(f"logged by {logger.name}" for logger in loggers)):
        assert text.count(part) == 1
    assert [(logger.handlers, logger.propagate) for logger in loggers] == before
    assert capsys.readouterr() == ("", "")
