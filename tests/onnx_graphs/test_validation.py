"""A right graph passes, by figures that other code finds too; every kind of wrong one fails, and says where."""

import hashlib
import json
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.samples.image_files import find_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.onnx import proof, stored
from ckpt_prune.onnx.checks import check_files, check_interface, hash_present_files, read_structure
from ckpt_prune.onnx.comparison import make_chunk_cases, make_prompts, make_text_cases
from ckpt_prune.onnx.metrics import Allowance, measure_image_metric
from ckpt_prune.onnx.records import Case, Metric, Validation, read_manifest, read_validation
from ckpt_prune.onnx.reference import GraphReference, HeldModel
from ckpt_prune.onnx.samples import ProofSamples
from ckpt_prune.onnx.session import OnnxModel, complete_inputs
from ckpt_prune.onnx.tasks import GraphTask
from tests import encoders, families
from tests.evaluation.tiny import VOCAB, random_windows, tiny_tokenizer
from tests.graphs import LAYERS, Exported
from tests.images import write_csv, write_image, write_processor
from tests.oracles.perplexity import perplexity

DECODER, ENCODER = "llama-gqa-tied", "bert-mlm"
GENERATION = GraphTask("text-generation", "text", cached=True)
WINDOWS = random_windows(6, 32, seed=11)
TEXT = ProofSamples(WINDOWS, description={"what": "random tokens", "seed": 11})
NOISE = ProofSamples(description={"what": "noise", "seed": 4})


def validate(graph: Path, model: Path, samples: ProofSamples, **settings: Any) -> Validation:
    """Validate the only graph of a folder."""
    validation = proof.validate(graph, model, samples, **settings)
    (only,) = validation.graphs
    assert validation.passed is only.passed
    return only


def checks(validation: Validation) -> dict[str, bool | None]:
    return {check.name: check.passed for check in validation.checks}


def detail(validation: Validation, name: str) -> str:
    return next(check.detail for check in validation.checks if check.name == name)


def failed_cases(validation: Validation) -> list[Case]:
    return [case for case in validation.cases if not case.passed]


def shape(case: Case) -> tuple[str, int, int | None, str, str]:
    return case.output, case.batch, case.tokens, case.padding, case.cache


@pytest.fixture
def copy(exported: Exported, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A model and a copy of its graph that may be changed."""

    def make(variant: str, **settings: Any) -> tuple[Path, Path]:
        model, graph = exported(variant, **settings)
        shutil.copytree(graph, tmp_path / "graph")
        return model, tmp_path / "graph"

    return make


# ---- right graphs --------------------------------------------------------------------------------------------------


def test_a_decoder_with_a_cache_is_proved_in_one_pass_in_chunks_and_step_by_step(exported: Exported) -> None:
    model, graph = exported(DECODER)
    validation = validate(graph, model, TEXT)
    assert validation.passed
    assert checks(validation) == dict.fromkeys(
        ["files", "checker", "interface", "load", "outputs", "generation", "metric"], True
    )
    assert [shape(case) for case in validation.cases] == [
        ("logits", 1, 1, "none", "none"),
        ("logits", 1, 16, "none", "none"),
        ("logits", 2, 7, "right", "none"),
        ("logits", 3, 24, "left", "none"),
        ("logits", 1, 32, "none", "none"),
        ("logits", 1, 24, "none", "chunks"),
        ("present.*", 1, 24, "none", "chunks"),
        ("logits", 2, 6, "none", "chunks"),
        ("present.*", 2, 6, "none", "chunks"),
        ("logits", 3, 24, "left", "chunks"),
        ("present.*", 3, 24, "left", "chunks"),
        ("logits", 1, 16, "none", "steps"),
        ("logits", 2, 16, "left", "steps"),
    ]
    assert all(case.agreement == 1.0 for case in validation.cases if case.output == "logits")
    # Computed by other kernels in another order: a difference of exactly nothing would be one graph held to itself.
    assert all(0 < case.max_abs < 1e-4 and case.largest > 0.1 for case in validation.cases)
    assert validation.against.name == DECODER
    assert validation.against.fingerprint == read_manifest(graph).source.fingerprint
    assert {"model.onnx", "config.json", "tokenizer.json"} <= set(validation.files)
    assert validation.files == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in graph.iterdir()
        if path.name not in ("README.md", "ckpt_prune_onnx.json")
    }
    assert not any(case.segments for case in validation.cases)  # a llama knows of none
    assert validation.data == TEXT.description
    assert (validation.provider, validation.note, validation.dtype, validation.tolerance) == ("cpu", None, "fp32", 1e-4)
    assert validation.versions["onnxruntime"]


def test_the_perplexity_of_both_is_that_of_the_textbook(exported: Exported) -> None:
    model, graph = exported(DECODER)
    (metric,) = validate(graph, model, TEXT).metrics
    expected = perplexity(families.stock(model), WINDOWS)
    assert metric.name == "perplexity"
    assert metric.of == "6 windows of 32 tokens"
    assert metric.pytorch == pytest.approx(expected, rel=1e-5)
    assert metric.onnxruntime == pytest.approx(expected, rel=1e-5)
    assert metric.onnxruntime != metric.pytorch or metric.difference == 0
    assert metric.difference < metric.tolerance == pytest.approx(1e-5)


def test_the_perplexity_of_one_window_is_taken_from_the_outputs_that_were_compared(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = exported(DECODER)
    lengths: list[int] = []
    run = OnnxModel.run

    def count(self: OnnxModel, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths.append(feed["input_ids"].shape[1])
        return run(self, feed)

    monkeypatch.setattr(OnnxModel, "run", count)
    (metric,) = validate(graph, model, ProofSamples(WINDOWS[2:3])).metrics
    assert lengths.count(32) == 1
    assert metric.of == "1 window of 32 tokens"
    expected = perplexity(families.stock(model), WINDOWS[2:3])
    assert metric.onnxruntime == pytest.approx(expected, rel=1e-5)
    assert metric.pytorch == pytest.approx(expected, rel=1e-5)
    # Both were computed, by kernels of their own.
    assert metric.kl is not None
    assert 0 < metric.difference < metric.tolerance


class Watch:
    """Records which models are loaded and which graphs are open during a proof."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[PreTrainedModel] = []
        self.sessions: list[weakref.ref[Any]] = []
        self.both: list[str] = []
        """Who ran while both were held, in order."""
        self.runs = {"graph": 0, "model": 0}
        opens, runs_graph, runs_model = OnnxModel.__init__, OnnxModel.run, GraphReference._call

        def load(*args: Any, **options: Any) -> PreTrainedModel:
            self.models.append(load_model(*args, **options))
            return self.models[-1]

        def open_graph(graph: OnnxModel, *args: Any, **options: Any) -> None:
            opens(graph, *args, **options)
            self.sessions.append(weakref.ref(graph.session.inner))
            self.note("load")

        def run_graph(graph: OnnxModel, feed: Any) -> Any:
            self.runs["graph"] += 1
            self.note("graph")
            return runs_graph(graph, feed)

        def run_model(reference: GraphReference, *args: Any) -> Any:
            self.runs["model"] += 1
            output = runs_model(reference, *args)
            self.note("model")
            return output

        monkeypatch.setattr(proof, "load_model", load)
        monkeypatch.setattr(OnnxModel, "__init__", open_graph)
        monkeypatch.setattr(OnnxModel, "run", run_graph)
        monkeypatch.setattr(GraphReference, "_call", run_model)

    def note(self, what: str) -> None:
        weights = any(parameter.numel() for model in self.models for parameter in model.parameters())
        if weights and any(session() is not None for session in self.sessions):
            self.both.append(what)


@pytest.mark.parametrize(
    ("variant", "samples"),
    [(DECODER, ProofSamples(WINDOWS[2:3])), (ENCODER, NOISE)],
)
def test_the_model_and_the_graph_are_not_held_at_once(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, variant: str, samples: ProofSamples
) -> None:
    model, graph = exported(variant)
    watch = Watch(monkeypatch)
    assert validate(graph, model, samples).passed
    assert watch.both == []
    assert watch.runs["graph"] >= 3
    assert watch.runs["model"] >= 3
    assert [session() for session in watch.sessions] == [None]


def test_outputs_that_wait_on_disk_are_judged_as_those_in_memory(
    copy: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = copy(DECODER)
    with edited_weight(graph, "model.norm.weight", honest=False) as values:
        values[3] += 0.5
    samples = ProofSamples(WINDOWS[2:3])
    in_memory = validate(graph, model, samples)
    monkeypatch.setattr(stored, "LARGE", -1)
    on_disk = validate(graph, model, samples)
    assert failed_cases(on_disk)
    assert on_disk == in_memory


def test_both_are_held_only_for_a_metric_for_which_the_graph_runs_again(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = exported(DECODER)
    watch = Watch(monkeypatch)
    assert validate(graph, model, TEXT).passed
    assert watch.both[: watch.both.index("graph")] == ["model"] * 10  # five texts, three in pieces, two generated
    assert watch.both.count("graph") == 1  # all six windows
    assert [session() for session in watch.sessions] == [None]


def test_an_encoder_is_padded_on_the_right_and_asked_for_masked_tokens(copy: Callable[..., tuple[Path, Path]]) -> None:
    model, graph = copy(ENCODER, embedded=0)
    validation = validate(graph, model, TEXT)
    assert validation.passed
    assert [shape(case)[1:4] for case in validation.cases] == [
        (1, 1, "none"),
        (1, 16, "none"),
        (2, 7, "right"),
        (3, 24, "right"),
        (1, 32, "none"),
    ]
    assert [case.segments for case in validation.cases] == [False, False, True, True, False]
    assert {"config.json", "model.onnx", "model.onnx_data"} <= set(validation.files)
    assert checks(validation)["metric"] is None
    assert detail(validation, "metric") == "its tokenizer has no mask token, so nothing can be masked"
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<unk>"
    tokenizer.save_pretrained(graph)
    (metric,) = validate(graph, model, TEXT).metrics
    assert metric.name == "masked perplexity"
    assert metric.of.endswith(" masked tokens in 6 windows of 32 tokens")
    assert metric.passed
    assert metric.onnxruntime == pytest.approx(metric.pytorch, rel=1e-5)


def test_every_output_of_images_is_compared_and_top_1_is_counted(exported: Exported, tmp_path: Path) -> None:
    model, graph = exported("deit-teacher")
    validation = validate(graph, model, NOISE)
    assert validation.passed
    names = ("logits", "cls_logits", "distillation_logits")
    assert [shape(case) for case in validation.cases] == [
        (n, b, None, "none", "none") for b in (1, 2, 5) for n in names
    ]
    assert detail(validation, "metric") == "not measured on noise: give --images"
    assert validation.metrics == []

    images = _images(model, tmp_path / "photos", labelled=True)
    (metric,) = validate(graph, model, ProofSamples(images=images)).metrics
    stock = encoders.stock(model, "deit-teacher")
    with torch.inference_mode():
        right = stock(**images.batch(slice(None))).logits.argmax(-1) == images.labels
    assert (metric.name, metric.of) == ("top-1", "9 images")
    assert metric.onnxruntime == metric.pytorch == right.double().mean().item()
    assert metric.passed
    plain = ProofSamples(images=_images(model, tmp_path / "plain", labelled=False))
    (metric,) = validate(graph, model, plain).metrics
    assert (metric.name, metric.onnxruntime, metric.pytorch) == ("agreement", 1.0, None)


def _images(model: Path, folder: Path, *, labelled: bool) -> ImageSamples:
    for index in range(9):
        write_image(folder / f"{index}.png", index, size=(20, 16))
    if labelled:
        write_csv(folder / "labels.csv", "file,label", *(f"{index}.png,{index % 7}" for index in range(9)))
    classes = {index: str(index) for index in range(7)}
    files = find_images(folder, split="eval", id2label=classes if labelled else None)
    return ImageSamples(files, load_processor(model), tokens=lambda _: 10)


def test_features_are_compared_with_those_of_the_base_model(exported: Exported) -> None:
    model, graph = exported("bert-model")
    validation = validate(graph, model, TEXT)
    assert validation.passed
    assert {case.output for case in validation.cases} == {"last_hidden_state", "pooler_output"}
    assert all(case.agreement is None for case in validation.cases)
    (metric,) = validation.metrics
    assert metric.name == "cosine"
    assert metric.onnxruntime == pytest.approx(1.0, abs=1e-6)


def test_half_precision_passes_its_own_tolerance_and_not_that_of_single(exported: Exported) -> None:
    model, graph = exported("vit", dtype="fp16")
    validation = validate(graph, model, NOISE)
    assert validation.passed
    assert (validation.dtype, validation.tolerance) == ("fp16", 2e-2)
    shares = [case.max_abs / case.largest for case in validation.cases]
    assert max(shares) < 1e-2  # room for deeper models
    strict = validate(graph, model, NOISE, tolerance=1e-4)
    assert not strict.passed
    assert len(failed_cases(strict)) == len(validation.cases)
    for case in failed_cases(strict):
        assert case.where is not None
        assert abs(case.where.onnxruntime - case.where.pytorch) == pytest.approx(case.max_abs, rel=1e-3)


def test_no_figure_is_lost_between_writing_and_reading(exported: Exported, tmp_path: Path) -> None:
    model, graph = exported("deit-teacher")
    validation = proof.validate(graph, model, NOISE, tolerance=1e-12)
    validation.write(tmp_path)
    assert read_validation(tmp_path) == validation
    text = (tmp_path / "validation.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["passed"] is False
    (tmp_path / "validation.json").write_text(text[:-200])
    with pytest.raises(UserError, match="is damaged: validate again"):
        read_validation(tmp_path)


# ---- the share of images in another class --------------------------------------------------------------------------


class Rows:
    """A classifier, and images for it: image i, whose pixel is i, has the logits of row i."""

    device, dtype, labels, size = torch.device("cpu"), torch.float64, None, (1, 1, 1)
    config = None

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def eval(self) -> "Rows":
        return self

    def batch(self, rows: slice) -> dict[str, Tensor]:
        return {"pixel_values": torch.arange(len(self.rows))[rows].view(-1, 1, 1, 1)}

    def __call__(self, pixel_values: Tensor) -> Any:
        return ModelOutput(logits=self.rows[pixel_values.flatten().long()])


def top_1(ours: list[list[float]], theirs: list[list[float]], tolerance: float) -> Metric:
    graph: Any = Rows(ours)
    reference: Any = SimpleNamespace(model=Rows(theirs))
    metric = measure_image_metric(graph, reference, "image-classification", graph, Allowance(tolerance))
    assert isinstance(metric, Metric)
    return metric


@st.composite
def two_of_logits(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    images, classes = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rows = st.lists(st.lists(st.integers(-8, 8), min_size=classes, max_size=classes), min_size=images, max_size=images)
    return draw(rows), draw(rows)


@settings(deadline=None)
@given(two_of_logits(), st.sampled_from([0.0, 1 / 16, 1 / 8, 1 / 2]))
def test_an_image_may_change_its_class_only_where_pytorch_itself_has_the_two_near(
    pair: tuple[list[list[float]], list[list[float]]], tolerance: float
) -> None:
    ours, theirs = pair
    largest = max(abs(value) for row in theirs for value in row)
    flips = [(a.index(max(a)), b.index(max(b)), b) for a, b in zip(ours, theirs, strict=True)]
    flips = [(mine, other, row) for mine, other, row in flips if mine != other]
    metric = top_1(ours, theirs, tolerance)
    assert metric.difference == pytest.approx(len(flips) / len(ours))
    assert metric.passed == all(row[other] - row[mine] <= 2 * tolerance * largest for mine, other, row in flips)


# ---- what both are run on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 5, 16, 24, 100])
def test_cases_are_of_the_text_and_padded_where_they_say(window: int) -> None:
    windows = torch.arange(1, 3 * window + 1).view(3, window)
    cases = [
        *make_text_cases(windows, pad=0, left=True),
        *make_chunk_cases(windows, pad=0),
        *make_prompts(windows, pad=0, context=window),
    ]
    for case in cases:
        assert case.ids.shape == case.keep.shape
        assert bool((case.ids[~case.keep] == 0).all())
        assert bool((case.ids[case.keep] != 0).all())
        assert bool(case.keep[0].all())
        assert bool(case.keep.any(1).all())
        assert bool(case.keep.all()) == (case.padding == "none")
        for ids, kept in zip(case.ids, case.keep, strict=True):
            there = ids[kept]
            assert bool((there.diff() == 1).all())  # neighbours in the text
            edge = kept if case.padding == "right" else kept.flip(0)
            assert bool((edge.int().diff() <= 0).all())  # padding on one side only
        if case.chunks:
            assert sum(case.chunks) == case.ids.shape[1]
            assert len(case.chunks) > 1
            assert bool(case.keep[:, : case.chunks[0]].any(1).all())  # no text starts later
        assert case.segments is None
    for case in make_text_cases(windows, pad=0, left=True, segments=True):
        assert (case.segments is None) == (len(case.ids) == 1)
        for kinds, kept in zip(case.segments if case.segments is not None else [], case.keep, strict=False):
            count = int(kept.sum())
            assert kinds[kept].tolist() == [0] * (count - count // 2) + [1] * (count // 2)
            assert not kinds[~kept].any()
    sizes = [(tuple(case.ids.shape), case.padding) for case in make_text_cases(windows, pad=0, left=True)]
    assert len(set(sizes)) == len(sizes)
    assert ((1, window), "none") in sizes
    assert any(padding == "left" for _, padding in sizes)


def _reference(model: Path) -> GraphReference:
    inputs = {"input_ids", "attention_mask", "position_ids"}
    return GraphReference(HeldModel(lambda: load_model(model, device="cpu", dtype=torch.float32)), GENERATION, inputs)


def test_the_reference_reads_a_padded_text_as_if_it_stood_alone(exported: Exported) -> None:
    model, _ = exported(DECODER)
    reference, stock = _reference(model), families.stock(model)
    (case,) = (candidate for candidate in make_text_cases(WINDOWS, pad=0, left=True) if candidate.padding == "left")
    logits = reference.run(complete_inputs({"input_ids": case.ids, "attention_mask": case.keep.long()}))["logits"]
    for row, kept in enumerate(case.keep):
        alone = families.logits(stock, case.ids[row, kept][None])[0]
        torch.testing.assert_close(logits[row, kept], alone, rtol=1e-4, atol=1e-4)


def test_the_reference_generates_what_the_stock_model_does(exported: Exported) -> None:
    model, _ = exported(DECODER)
    for case in make_prompts(WINDOWS, pad=0, context=32):
        mask = case.keep.long()
        fed = [feed["input_ids"] for feed, _ in _reference(model).generate(case.ids, mask, 9)]
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = families.stock(model).generate(case.ids, attention_mask=mask, **options)
        assert torch.cat(fed, 1).tolist() == expected.tolist()


# ---- wrong graphs --------------------------------------------------------------------------------------------------


@contextmanager
def edited_weight(graph: Path, name: str, *, honest: bool) -> Iterator[np.ndarray]:
    """Give out a weight inside model.onnx to be changed; an honest forger brings the record up to date."""
    path = graph / "model.onnx"
    proto = onnx.load(path)
    (initializer,) = [candidate for candidate in proto.graph.initializer if candidate.name == name]
    values = numpy_helper.to_array(initializer).copy()
    yield values
    initializer.CopyFrom(numpy_helper.from_array(values, name))
    onnx.save(proto, path)
    if honest:
        record = json.loads((graph / "ckpt_prune_onnx.json").read_text())
        record["graphs"][0]["tensors"][name] = hashlib.sha256(values.tobytes()).hexdigest()
        record["files"]["model.onnx"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (graph / "ckpt_prune_onnx.json").write_text(json.dumps(record))


BIAS = "cls.predictions.decoder.bias"


def test_a_weight_changed_with_its_digests_shows_in_the_outputs_and_where(
    copy: Callable[..., tuple[Path, Path]],
) -> None:
    model, graph = copy(ENCODER)
    with edited_weight(graph, BIAS, honest=True) as values:
        values[17] += 0.5
    validation = validate(graph, model, TEXT)
    assert {name for name, passed in checks(validation).items() if passed is False} == {"outputs"}
    assert len(failed_cases(validation)) == len(validation.cases) == 5
    for case in failed_cases(validation):
        assert case.where is not None
        assert case.where.unit == 17
        assert case.where.onnxruntime - case.where.pytorch == pytest.approx(0.5, abs=1e-5)
        assert case.max_abs == pytest.approx(0.5, abs=1e-5)
        assert case.mean_abs == pytest.approx(0.5 / VOCAB, rel=1e-3)
    assert detail(validation, "outputs") == "5 of 5 outputs are outside the tolerance of 0.0001"


def test_a_shift_too_small_for_the_largest_difference_fails_the_mean(copy: Callable[..., tuple[Path, Path]]) -> None:
    """Every logit moves by half of what one may: no single element tells, their mean does."""
    model, graph = copy(ENCODER)
    largest = min(case.largest for case in validate(graph, model, TEXT).cases)
    with edited_weight(graph, BIAS, honest=True) as values:
        values += 0.5e-4 * largest
    validation = validate(graph, model, TEXT)
    assert checks(validation)["outputs"] is False
    assert any(case.max_abs < 1e-4 * case.largest for case in failed_cases(validation))


def test_what_is_not_a_number_is_said_to_be_none(copy: Callable[..., tuple[Path, Path]]) -> None:
    model, graph = copy(ENCODER)
    with edited_weight(graph, BIAS, honest=False) as values:
        values[3] = np.nan
    validation = validate(graph, model, TEXT)
    assert f"weights differ or cannot be read: {BIAS}" in detail(validation, "files")
    assert all(case.note == "onnxruntime's output is nan there" for case in failed_cases(validation))
    assert all(case.where.unit == 3 and case.where.onnxruntime is None for case in failed_cases(validation))
    assert all(case.max_abs is None and case.mean_rel is None for case in failed_cases(validation))
    assert len(failed_cases(validation)) == 5
    assert json.loads(validation.model_dump_json(), parse_constant=lambda name: pytest.fail(name))


def test_a_model_that_is_no_number_itself_is_not_blamed_on_the_graph(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = exported(ENCODER)

    def load_damaged(*args: Any, **options: Any) -> PreTrainedModel:
        loaded = load_model(*args, **options)
        with torch.no_grad():
            loaded.get_parameter("cls.predictions.bias")[5] = math.nan
        return loaded

    monkeypatch.setattr(proof, "load_model", load_damaged)
    validation = validate(graph, model, TEXT)
    assert {case.note for case in validation.cases} == {
        "PyTorch's own output is no finite number there: the model is damaged, or overflows in float32"
    }


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_changed_file_beside_the_graph_is_named_and_nothing_said_of_weights(
    copy: Callable[..., tuple[Path, Path]], name: str
) -> None:
    model, graph = copy(ENCODER)
    with (graph / name).open("a") as file:
        file.write(" ")
    validation = validate(graph, model, TEXT)
    assert {check for check, passed in checks(validation).items() if passed is False} == {"files"}
    assert detail(validation, "files") == f"{name} changed since it was written"
    with edited_weight(graph, BIAS, honest=False) as values:
        values += 1
    manifest = read_manifest(graph)
    assert check_files(graph, manifest, hash_present_files(graph, manifest)) == (
        False,
        f"{name} changed since it was written; model.onnx changed since it was written: 1 of "
        f"{len(read_manifest(graph).graph.tensors)} weights differ or cannot be read: {BIAS}",
    )


def test_a_changed_node_is_told_from_a_changed_weight(copy: Callable[..., tuple[Path, Path]]) -> None:
    model, graph = copy(ENCODER)
    proto = onnx.load(graph / "model.onnx")
    node = next(node for node in proto.graph.node if node.op_type == "Softmax")
    node.op_type = "LogSoftmax"
    onnx.save(proto, graph / "model.onnx")
    validation = validate(graph, model, TEXT)
    weights = len(read_manifest(graph).graph.tensors)
    assert detail(validation, "files") == f"model.onnx changed since it was written: not in its {weights} weights"
    assert checks(validation)["checker"] is True
    assert checks(validation)["outputs"] is False


def test_what_onnx_does_not_know_fails_the_checker(copy: Callable[..., tuple[Path, Path]]) -> None:
    model, graph = copy(ENCODER)
    proto = onnx.load(graph / "model.onnx")
    next(node for node in proto.graph.node if node.op_type == "Softmax").op_type = "Softmaximum"
    onnx.save(proto, graph / "model.onnx")
    validation = validate(graph, model, TEXT)
    assert "No Op registered for Softmaximum" in detail(validation, "checker")
    assert checks(validation)["load"] is False


Feed = dict[str, Tensor]


def _no_mask(feed: Feed, outputs: Feed) -> tuple[Feed, Feed]:
    return feed | {"attention_mask": torch.ones_like(feed["attention_mask"])}, outputs


def _own_positions(feed: Feed, outputs: Feed) -> tuple[Feed, Feed]:
    total, new = feed["attention_mask"].shape[1], feed["input_ids"].shape[1]
    return feed | {"position_ids": torch.arange(total - new, total).expand_as(feed["input_ids"])}, outputs


def _layers_mixed_up(feed: Feed, outputs: Feed) -> tuple[Feed, Feed]:
    mixed = {"present.0.key": outputs["present.1.key"], "present.1.key": outputs["present.0.key"]} if outputs else {}
    return feed, outputs | mixed


def _positions_from_zero(feed: Feed, outputs: Feed) -> tuple[Feed, Feed]:
    return feed | {"position_ids": torch.arange(feed["input_ids"].shape[1]).expand_as(feed["input_ids"])}, outputs


FAULTS: dict[str, tuple[Any, Callable[[Case], bool]]] = {
    "the mask is not looked at": (_no_mask, lambda case: case.padding == "left"),
    "positions count padding": (_own_positions, lambda case: case.padding == "left" and case.tokens > 1),
    "the cache's layers are mixed up": (_layers_mixed_up, lambda case: case.cache != "none"),
    "positions start at zero in every call": (
        _positions_from_zero,
        lambda case: case.cache != "none" or case.padding == "left",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_way_to_be_wrong_shows_in_the_cases_made_for_it_and_in_no_other(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A llama's rotary positions are relative: counting padding along moves no logit, but keys in the cache."""
    model, graph = exported(DECODER)
    wrong, expected = FAULTS[fault]
    run = OnnxModel.run

    def run_broken(self: OnnxModel, feed: Feed) -> Feed:
        return wrong(feed, run(self, wrong(feed, {})[0]))[1]

    monkeypatch.setattr(OnnxModel, "run", run_broken)
    validation = validate(graph, model, TEXT)
    assert not validation.passed
    assert failed_cases(validation)
    assert all(expected(case) for case in failed_cases(validation)), [shape(case) for case in failed_cases(validation)]
    if fault != "positions count padding":
        steps = [case for case in validation.cases if case.cache == "steps" and expected(case)]
        assert steps
        assert not any(case.passed for case in steps)
        assert checks(validation)["generation"] is False
    else:
        assert {case.output for case in failed_cases(validation)} <= {f"present.{i}.key" for i in range(LAYERS)}


def test_segments_that_are_not_looked_at_show_in_batches(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = exported(ENCODER)
    run = OnnxModel.run

    def run_broken(self: OnnxModel, feed: Feed) -> Feed:
        return run(self, feed | {"token_type_ids": torch.zeros_like(feed["input_ids"])})

    monkeypatch.setattr(OnnxModel, "run", run_broken)
    validation = validate(graph, model, TEXT)
    assert [case.passed for case in validation.cases] == [True, True, False, False, True]
    assert [case.passed for case in validation.cases] == [not case.segments for case in validation.cases]


def test_a_graph_that_fails_on_some_inputs_fails_those_cases(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = exported(ENCODER)
    run = OnnxModel.run

    def run_broken(self: OnnxModel, feed: Feed) -> Feed:
        if len(feed["input_ids"]) == 3:
            raise UserError("onnxruntime cannot run the graph on three")
        return run(self, feed)

    monkeypatch.setattr(OnnxModel, "run", run_broken)
    validation = validate(graph, model, TEXT)
    (case,) = failed_cases(validation)
    assert (case.batch, case.note, case.max_abs) == (3, "onnxruntime cannot run the graph on three", None)


@pytest.mark.parametrize(("row", "token"), [(0, 3), (1, 23), (2, 12)])
def test_the_worst_place_is_counted_with_its_padding(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, row: int, token: int
) -> None:
    model, graph = exported(DECODER)
    run = OnnxModel.run

    def run_broken(self: OnnxModel, feed: Feed) -> Feed:
        outputs = run(self, feed)
        if feed["input_ids"].shape == (3, 24):
            outputs["logits"][row, token, 5] += 3
            outputs["logits"][2, 2, 5] += 30  # on padding, of which nothing is said
        return outputs

    monkeypatch.setattr(OnnxModel, "run", run_broken)
    (case,) = failed_cases(validate(graph, model, TEXT))
    assert (case.padding, case.cache) == ("left", "none")
    assert case.where is not None
    assert (case.where.batch, case.where.token, case.where.unit) == (row, token, 5)
    assert case.max_abs == pytest.approx(3, abs=1e-5)


def test_another_shape_is_a_failed_case(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = exported(ENCODER)
    run = OnnxModel.run
    monkeypatch.setattr(OnnxModel, "run", lambda self, feed: {k: v[:, :1] for k, v in run(self, feed).items()})
    notes = [case.note for case in validate(graph, model, TEXT).cases]
    assert notes[0] is None
    assert notes[1] == "[1, 1, 40] in onnxruntime, [1, 16, 40] in PyTorch"


def test_a_perplexity_that_is_off_fails_though_every_output_is_right(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = exported(DECODER)
    call = OnnxModel.__call__

    def sharper(self: OnnxModel, **inputs: Any) -> Any:
        output = call(self, **inputs)
        output["logits"] = output.logits * 1.001
        return output

    monkeypatch.setattr(OnnxModel, "__call__", sharper)
    validation = validate(graph, model, TEXT)
    assert {name for name, passed in checks(validation).items() if passed is False} == {"metric"}
    assert not validation.metrics[0].passed


# ---- inputs and outputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_a_fixed_axis_is_refused_also_where_the_record_agrees(
    copy: Callable[..., tuple[Path, Path]], axis: int
) -> None:
    model, graph = copy(ENCODER)
    path = graph / "model.onnx"
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[axis].Clear()
        value.type.tensor_type.shape.dim[axis].dim_value = 2
    onnx.save(proto, path)
    validation = validate(graph, model, TEXT)
    assert "its record says" in detail(validation, "interface")
    record = json.loads((graph / "ckpt_prune_onnx.json").read_text())
    for port in (*record["graphs"][0]["inputs"], *record["graphs"][0]["outputs"]):
        port["shape"][axis] = 2
    (graph / "ckpt_prune_onnx.json").write_text(json.dumps(record))
    validation = validate(graph, model, TEXT)
    assert checks(validation)["outputs"] is False
    assert not all(case.passed for case in validation.cases)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ["scores"]}, "scores, which the model returns, is no output; and 1 more"),
        ({"cache": 3}, "keys and values of 2 layers are an input, the model has 3 layers; and 1 more"),
        ({"cache": 2}, ""),
    ],
)
def test_inputs_and_outputs_have_the_names_of_the_models(
    exported: Exported, change: dict[str, Any], message: str
) -> None:
    _, graph = exported(DECODER)
    cache = [f"present.{layer}.{kind}" for layer in range(change.get("cache", 2)) for kind in ("key", "value")]
    passed, detail = check_interface(
        read_structure(graph / "model.onnx"), read_manifest(graph), change.get("outputs", ["logits"]), cache
    )
    assert passed is not bool(message)
    assert detail == (message or "7 inputs and 5 outputs as the model has them, keys and values of 2 layers")


def test_other_names_than_the_record_has_are_refused(copy: Callable[..., tuple[Path, Path]]) -> None:
    model, graph = copy(ENCODER)
    record = json.loads((graph / "ckpt_prune_onnx.json").read_text())
    record["graphs"][0]["outputs"][0]["name"] = "scores"
    (graph / "ckpt_prune_onnx.json").write_text(json.dumps(record))
    validation = validate(graph, model, TEXT)
    assert detail(validation, "interface").startswith("the graph's outputs are logits, its record says scores")
    assert checks(validation)["load"] is False


CONSTANT = {
    "attention_mask": [("Equal", "same"), ("Cast", "attention_mask")],
    "token_type_ids": [("Sub", "token_type_ids")],
}
"""Nodes that make an input of ones, or of zeros, out of input_ids."""


def without_input(graph: Path, name: str) -> None:
    """Put a constant in the place of an input, honestly recorded."""
    path = graph / "model.onnx"
    proto = onnx.load(path)
    for index, (operator, output) in reversed(list(enumerate(CONSTANT[name]))):
        reads = ["input_ids"] * 2 if index == 0 else ["same"]
        to = {"to": onnx.TensorProto.INT64} if operator == "Cast" else {}
        proto.graph.node.insert(0, onnx.helper.make_node(operator, reads, [output], **to))
    proto.graph.input.remove(next(port for port in proto.graph.input if port.name == name))
    onnx.save(proto, path)
    record = json.loads((graph / "ckpt_prune_onnx.json").read_text())
    record["graphs"][0]["inputs"] = [port for port in record["graphs"][0]["inputs"] if port["name"] != name]
    record["files"]["model.onnx"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (graph / "ckpt_prune_onnx.json").write_text(json.dumps(record))


@pytest.mark.parametrize("name", CONSTANT)
def test_an_input_that_the_model_reads_must_be_there(copy: Callable[..., tuple[Path, Path]], name: str) -> None:
    model, graph = copy(ENCODER)
    without_input(graph, name)
    validation = validate(graph, model, TEXT)
    assert detail(validation, "interface") == f"{name}, which the model's outputs depend on, is no input"
    assert {check for check, passed in checks(validation).items() if passed is False} == {"interface"}


def test_an_input_that_the_model_ignores_may_be_gone(
    copy: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = copy(ENCODER)
    without_input(graph, "token_type_ids")

    def deaf(*args: Any, **options: Any) -> PreTrainedModel:
        loaded = load_model(*args, **options)
        with torch.no_grad():
            kinds = loaded.get_parameter("bert.embeddings.token_type_embeddings.weight")
            kinds[1] = kinds[0]
        return loaded

    monkeypatch.setattr(proof, "load_model", deaf)
    validation = validate(graph, model, TEXT)
    assert validation.passed
    assert detail(validation, "interface") == "2 inputs and 1 outputs as the model has them"


def test_segments_of_which_there_is_one_kind_are_not_read(exported: Exported) -> None:
    model, _ = exported(ENCODER)
    loaded = load_model(model, device="cpu", dtype=torch.float32)
    loaded.config.type_vocab_size = 1
    reference = GraphReference(HeldModel(lambda: loaded), GraphTask("fill-mask", "text", cached=False), set())
    assert reference.segments == 1
    assert not reference.depends_on("token_type_ids")


# ---- bad arguments -------------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_refused(exported: Exported, tmp_path: Path) -> None:
    model, graph = exported(ENCODER)
    other, vision = exported("deit-teacher")
    with pytest.raises(UserError, match="was not written by `ckpt-prune export`"):
        validate(model, model, TEXT)
    with pytest.raises(UserError, match=f"was not made from .*: its record names {ENCODER}"):
        validate(graph, other, TEXT)
    with pytest.raises(UserError, match="reads image: it cannot be compared on the other"):
        validate(vision, other, TEXT)
    with pytest.raises(UserError, match="longer than the model's context of 32"):
        validate(graph, model, ProofSamples(random_windows(2, 33)))
    with pytest.raises(UserError, match=f"outside the model's vocabulary of {VOCAB}"):
        validate(graph, model, ProofSamples(torch.full((2, 8), VOCAB)))


def test_images_of_another_size_are_refused(exported: Exported, tmp_path: Path) -> None:
    model, graph = exported("deit-teacher")
    write_processor(tmp_path / "odd", size={"height": 16, "width": 12})
    shutil.copy(model / "config.json", tmp_path / "odd")
    images = _images(tmp_path / "odd", tmp_path / "photos", labelled=False)
    with pytest.raises(UserError, match="the images are 3 x 16 x 12 after preprocessing, the model reads 3 x 12 x 12"):
        validate(graph, model, ProofSamples(images=images))


def test_a_text_shorter_than_the_cases_is_used_whole_and_nothing_twice(exported: Exported) -> None:
    model, graph = exported(DECODER)
    validation = validate(graph, model, ProofSamples(random_windows(1, 5)))
    assert validation.passed
    cases = [shape(case) for case in validation.cases]
    assert len(set(cases)) == len(cases) == 12
    assert {case.tokens for case in validation.cases if case.cache != "steps"} == {1, 5}
