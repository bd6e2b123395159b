"""FLOPs of a workload, against torch's own counter on the model that runs it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ckpt_prune.benchmarking.costs import costs_of, weights_bytes
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.modeling_pruned import cache_argument
from tests import encoders, families
from tests.job.test_cost import rotary_flops

BATCH, TOKENS, STEPS = 2, 7, 3


def counted(call) -> tuple[int, object]:
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
    costs = costs_of(checkpoint)
    assert costs.parameters == loaded.num_parameters()
    if loaded.main_input_name == "pixel_values":
        workload = Workload("image", BATCH, 0, 0, False, False, 0, (3, encoders.IMAGE, encoders.IMAGE))
        assert costs.flops(workload, "forward") == counted(lambda: loaded(**workload.inputs()))[0]
        return
    generates = loaded.can_generate()
    workload = Workload("text", BATCH, TOKENS, STEPS if generates else 0, generates, generates, 40, (0, 0, 0))
    flags = {"use_cache": True} if generates else {}
    flops, result = counted(lambda: loaded(**workload.inputs(), **flags))
    assert costs.flops(workload, workload.phase) == flops
    if not generates:
        return
    total, name = 0, cache_argument(loaded.forward)
    for _ in range(STEPS):
        inputs = {"input_ids": result.logits[:, -1:].argmax(-1), name: getattr(result, name)}
        flops, result = counted(lambda inputs=inputs: loaded(**inputs, use_cache=True))
        total += flops
    assert costs.flops(workload, "decode") * STEPS == total


def test_an_unknown_family_has_no_figures(tmp_path):
    folder = encoders.make(tmp_path / "model", "opt")
    checkpoint = Checkpoint.open(folder)
    checkpoint.config["model_type"] = "rwkv"
    assert costs_of(checkpoint) is None


def test_size_on_disk_is_of_all_shards(tmp_path):
    folder = families.make(tmp_path / "model", "llama", shard="10KB")
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert weights_bytes(Checkpoint.open(folder)) == sum(len(file.read_bytes()) for file in files)
