"""Which graph of a model is taken, and what a model costs: FLOPs against torch's own counter."""

import json
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from ckpt_prune.benchmarking import models
from ckpt_prune.benchmarking.models import add_graph, count_costs, open_model
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.export import GraphWriter
from ckpt_prune.options.commands import BenchmarkOptions
from tests import encoders, families
from tests.cli.running import edit_weights
from tests.job.test_cost import rotary_flops

VARIANT = "llama-gqa-tied"


@pytest.fixture
def output(exported, tmp_path):
    """A checkpoint with its graph in its folder onnx."""
    model, graph = exported(VARIANT)
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(graph, tmp_path / "model" / "onnx")
    return tmp_path / "model"


def options(**given) -> BenchmarkOptions:
    return BenchmarkOptions.model_validate({"a": "a", "b": "b", "onnx": True} | given)


def open_it(folder, **given):
    messages = []
    return open_model("A", str(folder), options(**given), messages.append), messages


def test_the_graph_in_its_folder_is_taken(output):
    benchmark_model, messages = open_it(output)
    assert benchmark_model.graph == output / "onnx"
    assert benchmark_model.manifest.task == "text-generation"
    assert benchmark_model.checkpoint.path == output
    assert messages == [f"{output}: using the graph in {output / 'onnx'}"]
    assert open_it(output, dtype="fp32", optimize="none")[1] == messages


@pytest.mark.parametrize(
    ("wish", "reason"),
    [({"dtype": "fp16"}, "it is fp32"), ({"optimize": "cpu"}, "it was written with --optimize none")],
)
def test_another_graph_than_that_in_its_folder_is_wanted(output, wish, reason):
    benchmark_model, messages = open_it(output, **wish)
    assert (benchmark_model.graph, benchmark_model.manifest) == (None, None)
    assert messages == [f"{output}: the graph in {output / 'onnx'} is not used: {reason}"]


def test_a_graph_of_other_weights_is_not_taken(output):
    edit_weights(output, lambda tensors: tensors["model.norm.weight"].add_(1))
    benchmark_model, messages = open_it(output)
    assert benchmark_model.graph is None
    assert messages == [f"{output}: the graph in {output / 'onnx'} is not used: it was made of other weights"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"task": "feature-extraction", "cached": False},
            "it is for feature-extraction, not for text-generation with a cache",
        ),
        ({"cached": False}, "it is for text-generation, not for text-generation with a cache"),
    ],
)
def test_a_graph_for_another_task_is_not_taken(output, record, reason):
    path = output / "onnx" / GRAPH_RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | record))
    benchmark_model, messages = open_it(output)
    assert (benchmark_model.graph, benchmark_model.manifest) == (None, None)
    assert messages == [f"{output}: the graph in {output / 'onnx'} is not used: {reason}"]


def test_a_graph_is_made_as_wanted(exported, tmp_path, monkeypatch):
    """The exporter is another room's; here only what it is asked for."""
    model, graph = exported(VARIANT)
    exports = []

    def write(writer, *, trust):
        exports.append((writer.source.path, writer.out, writer._settings.dtype, writer._settings.optimize, trust))
        return models.read_manifest(graph)

    monkeypatch.setattr(GraphWriter, "write", write)
    benchmark_model, messages = open_it(model)
    with_graph = add_graph(
        benchmark_model, options(optimize="cpu", dtype="fp16", trust_remote_code=True), tmp_path, messages.append
    )
    assert exports == [(model, tmp_path / "A", ("fp16",), "cpu", True)]
    assert with_graph.graph == tmp_path / "A"
    assert messages == [f"{model}: exporting a graph, for this run only"]


def test_what_cannot_be_exported_is_named(exported, tmp_path):
    model, _ = exported(VARIANT)
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2}))
    benchmark_model, messages = open_it(tmp_path / "model")
    with pytest.raises(UserError) as caught:
        add_graph(benchmark_model, options(), tmp_path / "scratch", messages.append)
    assert str(caught.value).startswith(f"{tmp_path / 'model'} in onnxruntime: ")


BATCH, TOKENS, STEPS = 2, 7, 3


def count_flops(call) -> tuple[int, object]:
    """FLOPs of a call, and what it returns."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        result = call()
    return counter.get_total_flops() - rotary_flops(counter), result


@pytest.fixture(
    params=["llama-gqa-tied", "qwen3-biases-mha", "opt", "bert-sequence-classification", "vit", "dinov2-model"]
)
def model(request, tmp_path):
    variant = request.param
    maker = families.make if variant in families.VARIANTS else encoders.make
    folder = maker(tmp_path / "model", variant)
    loaded = load_model(folder, device="cpu")
    loaded.set_attn_implementation("eager")  # so that the counter sees both of its products
    return Checkpoint.open(folder), loaded


def test_flops_are_those_that_torch_counts(model):
    checkpoint, loaded = model
    costs = count_costs(checkpoint)
    assert costs.parameters == loaded.num_parameters()
    if loaded.main_input_name == "pixel_values":
        workload = Workload("image", BATCH, 0, 0, False, False, 0, (3, encoders.IMAGE, encoders.IMAGE))
        assert costs.flops(workload, "forward") == count_flops(lambda: loaded(**workload.make_inputs()))[0]
        return
    generates = loaded.can_generate()
    workload = Workload("text", BATCH, TOKENS, STEPS if generates else 0, generates, generates, 40, (0, 0, 0))
    flags = {"use_cache": True} if generates else {}
    flops, result = count_flops(lambda: loaded(**workload.make_inputs(), **flags))
    assert costs.flops(workload, workload.phase) == flops
    if not generates:
        return
    total, name = 0, cache_argument(loaded.forward)
    for _ in range(STEPS):
        inputs = {"input_ids": result.logits[:, -1:].argmax(-1), name: getattr(result, name)}
        flops, result = count_flops(lambda inputs=inputs: loaded(**inputs, use_cache=True))
        total += flops
    assert costs.flops(workload, "decode") * STEPS == total


def test_flops_of_a_mixture_grow_by_as_many_experts_as_a_token_has(tmp_path):
    """Inputs of 1, 2 and 3 tokens reach few experts each, which made figures below zero."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"intermediate_size": 24, "vocab_size": 64, "num_local_experts": 6, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**shape, **sizes)).save_pretrained(tmp_path)
    costs, experts = count_costs(Checkpoint.open(tmp_path)), 2 * 2 * (3 * 32 * 24)
    others = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 6 * 32) + 64 * 32
    assert (costs.once, costs.per_token) == (0, 2 * (experts + others))
    assert costs.per_pair == 2 * 4 * 32


def test_an_unknown_family_has_no_figures(tmp_path):
    folder = encoders.make(tmp_path / "model", "opt")
    checkpoint = Checkpoint.open(folder)
    checkpoint.config["model_type"] = "rwkv"
    assert count_costs(checkpoint) is None
