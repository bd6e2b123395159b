"""A small graph of every use of a weight: what is stored computes what was measured."""

import re
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ckpt_prune.common import progress
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import format_duration
from ckpt_prune.onnx.quantization import measuring
from ckpt_prune.onnx.quantization.deciding import Decider, Measuring, Scheme, decide, store
from ckpt_prune.onnx.quantization.measuring import Probe, measure_grams
from ckpt_prune.onnx.quantization.weights import copy_with_products, find_weights
from ckpt_prune.onnx.writing import count_written_bytes, write_graph

WIDTH, VOCABULARY = 40, 48
RNG = np.random.default_rng(2)


def graph() -> onnx_ir.Model:
    """An embedding tied to a head, a product, a Gemm either way round, and a weight that is added too."""
    arrays = {
        "table": RNG.standard_normal((VOCABULARY, WIDTH), dtype=np.float32),
        "w": RNG.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 6,
        "g": RNG.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 6,
        "h": RNG.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 6,
        "b": RNG.standard_normal(WIDTH, dtype=np.float32),
        "both": RNG.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 6,
        "small": RNG.standard_normal((WIDTH, 2), dtype=np.float32),
        "flat": np.array([-1, WIDTH]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x3"], "look"),
        helper.make_node("Reshape", ["x3", "flat"], ["x"], "flatten"),
        helper.make_node("MatMul", ["x", "w"], ["y0"], "product"),
        helper.make_node("Tanh", ["y0"], ["y"], "tanh"),
        helper.make_node("Gemm", ["y", "g", "b"], ["z0"], "gemm"),
        helper.make_node("Gemm", ["z0", "h"], ["z1"], "turned", transB=1),
        helper.make_node("MatMul", ["z1", "both"], ["z2"], "shared"),
        helper.make_node("ReduceSum", ["both"], ["sum"], "sums"),
        helper.make_node("Add", ["z2", "sum"], ["z"], "added"),
        helper.make_node("MatMul", ["z", "small"], ["tiny"], "narrow"),
        helper.make_node("Transpose", ["table"], ["head"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["z", "head"], ["logits"], "read"),
    ]
    graph_proto = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"])],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["positions", VOCABULARY]),
            helper.make_tensor_value_info("tiny", TensorProto.FLOAT, ["positions", 2]),
        ],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))


MODEL = graph()
FEEDS = [{"ids": RNG.integers(0, VOCABULARY, (4, 12))} for _ in range(3)]
MEASURING = Measuring(FEEDS[:1], FEEDS, ("logits",), classes=True, what="random tokens")
NAMES = {"table", "w", "g", "h"}


EXPERTS = 3


def mixture() -> onnx_ir.Model:
    """Each expert reads one token in three, the last none. All stand in one tensor."""
    arrays = {
        "table": RNG.standard_normal((VOCABULARY, WIDTH), dtype=np.float32),
        "experts": RNG.standard_normal((EXPERTS, WIDTH, VOCABULARY), dtype=np.float32) / 6,
        "flat": np.array([-1, WIDTH]),
        "first": np.array([0]),
        **{
            f"sent{e}": np.arange(e, 12, EXPERTS) if e + 1 < EXPERTS else np.array([], np.int64) for e in range(EXPERTS)
        },
    }
    parts = [f"part{e}" for e in range(EXPERTS)]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x3"], "look"),
        helper.make_node("Reshape", ["x3", "flat"], ["x"], "flatten"),
        helper.make_node("Split", ["experts"], parts, "split", axis=0, num_outputs=EXPERTS),
    ]
    for e, part in enumerate(parts):
        nodes += [
            helper.make_node("Squeeze", [part, "first"], [f"w{e}"], f"squeeze{e}"),
            helper.make_node("Gather", ["x", f"sent{e}"], [f"x{e}"], f"send{e}"),
            helper.make_node("MatMul", [f"x{e}", f"w{e}"], [f"y{e}"], f"product{e}"),
        ]
    nodes.append(helper.make_node("Concat", [f"y{e}" for e in range(EXPERTS)], ["logits"], "join", axis=0))
    graph_proto = helper.make_graph(
        nodes,
        "mixture",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["positions", VOCABULARY])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))


def scheme(kind="blocks", bits=4, allowed=100.0, rounding="nearest") -> Scheme:
    return Scheme(kind, bits, 16, symmetric=False, accuracy=0, rounding=rounding, allowed=allowed)


def run(model: onnx_ir.Model, feed: dict = FEEDS[0]) -> np.ndarray:
    data = onnx_ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(["logits"], feed)[0]


def divergence(model: onnx_ir.Model, feed: dict = FEEDS[0]) -> float:
    """KL of the logits from those of the graph as it was, by the definition."""
    logs = []
    for logits in (run(MODEL, feed).astype(np.float64), run(model, feed).astype(np.float64)):
        shifted = logits - logits.max(1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(1).mean())


def operators(model: onnx_ir.Model) -> list[str]:
    return sorted(node.op_type for node in model.graph)


def test_weights_are_those_that_nothing_else_is_done_with():
    copy = copy_with_products(MODEL)
    weights = {weight.name: weight for weight in find_weights(copy.graph)}
    assert set(weights) == NAMES  # `both` is summed too, `small` is not worth it
    assert weights["table"].shape == (WIDTH, VOCABULARY)
    assert len(weights["table"].lookups) == len(weights["table"].products) == 1
    assert (weights["g"].is_table, weights["h"].is_table) == (False, True)


def test_gemms_are_split_without_a_difference():
    copy = copy_with_products(MODEL)
    assert "Gemm" not in operators(copy)
    assert np.allclose(run(copy), run(MODEL), atol=1e-5)


@pytest.mark.parametrize(("kind", "rounding"), [("blocks", "nearest"), ("blocks", "gptq"), ("dynamic", "nearest")])
def test_experts_are_rounded_one_by_one(tmp_path, monkeypatch, kind, rounding):
    """All in one tensor they stayed in float32. One that no token was sent to has no Gram, and runs on no rows."""
    model = mixture()
    names = {f"experts.{e}" for e in range(EXPERTS)}
    decision = decide({None: model}, scheme(kind, 4 if kind == "blocks" else 8, rounding=rounding), MEASURING, tmp_path)
    assert decision.blocks.keys() | decision.find("int8") == names | {"table"}
    stored = store(model, decision, MEASURING, tmp_path)
    if kind == "blocks":
        array = model.graph.initializers["experts"].const_value.numpy()
        for e in range(EXPERTS):
            assert np.abs(decision.blocks[f"experts.{e}"].to_matrix() - array[e]).max() < 0.2
    x = model.graph.initializers["table"].const_value.numpy()
    assert np.abs(run(stored) - run(model)).max() < 0.1 * np.abs(x).max()
    assert not any(
        len(v.const_value.shape) == 3 and v.const_value.dtype == onnx_ir.DataType.FLOAT
        for v in stored.graph.initializers.values()
    )
    grams = measure_grams(model, FEEDS, tmp_path)
    assert grams.keys() == names - {f"experts.{EXPERTS - 1}"}
    monkeypatch.setattr(measuring, "_MOST_GRAMS", EXPERTS * WIDTH**2 * 4 - 1)
    assert not measure_grams(model, FEEDS, tmp_path)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_was_measured_is_what_is_stored(tmp_path, bits, rounding):
    decision = decide({None: MODEL}, scheme(bits=bits, rounding=rounding), MEASURING, tmp_path)
    stored = store(MODEL, decision, MEASURING, tmp_path)
    assert decision.record.weights == {f"{bits}-bit blocks": 4}
    assert decision.record.padded == 4  # 40 is no multiple of 16
    assert divergence(stored) == pytest.approx(decision.record.loss, rel=1e-3, abs=1e-7)
    assert operators(stored).count("MatMulNBits") == 4
    assert operators(stored).count("GatherBlockQuantized") == 1
    # The embedding and its head share what is stored.
    assert [name for name in stored.graph.initializers if name.startswith("table")] != []
    assert sum(name.startswith("table_Q") and "_" not in name[8:] for name in stored.graph.initializers) == 1
    onnx.checker.check_model(onnx_ir.to_proto(stored))


def test_the_graph_that_is_given_is_left_alone(tmp_path):
    before = operators(MODEL)
    store(MODEL, decide({None: MODEL}, scheme(), MEASURING, tmp_path), MEASURING, tmp_path)
    assert operators(MODEL) == before
    assert set(MODEL.graph.initializers) >= NAMES


def test_the_most_harmful_stay_in_eight_bits(tmp_path):
    free = decide({None: MODEL}, scheme(), MEASURING, tmp_path).record.loss
    decision = decide({None: MODEL}, scheme(allowed=free / 3), MEASURING, tmp_path)
    record = decision.record
    assert record.kept
    assert record.weights["8-bit blocks"] == len(record.kept)
    assert record.loss <= free / 3
    stored = store(MODEL, decision, MEASURING, tmp_path)
    assert divergence(stored) == pytest.approx(record.loss, rel=1e-3)
    by_byte = [
        entry.harm / np.prod(np.shape(MODEL.graph.initializers[entry.name].const_value)) for entry in record.kept
    ]
    assert by_byte == sorted(by_byte, reverse=True)


def sized(limit, rounding="nearest"):
    return replace(scheme(rounding=rounding), limit=limit, blocks=(16, 32, 64))


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_a_size_is_kept_to_and_more_bytes_lose_no_more(tmp_path, rounding):
    """From little above the least size to that of plain weights, of which all but those in blocks stay as they are."""
    plain = count_written_bytes(MODEL)
    losses, kinds = [], set()
    for limit in (15_100, 16_000, 18_000, 22_000, 30_000, plain + 2_000):
        decision = decide({None: MODEL}, sized(limit, rounding), MEASURING, tmp_path)
        stored = store(MODEL, decision, MEASURING, tmp_path)
        write_graph(stored, tmp_path / "stored.onnx")
        assert (tmp_path / "stored.onnx").stat().st_size == count_written_bytes(stored) <= limit
        assert divergence(stored) == pytest.approx(decision.record.loss, rel=1e-3, abs=1e-6)
        losses.append(decision.record.loss)
        kinds |= decision.record.weights.keys()
    assert losses[-1] == pytest.approx(0, abs=1e-9)
    assert losses[-1] < losses[-2] < losses[0]
    assert {"4-bit blocks", "float32"} < kinds


def test_a_size_below_that_of_four_bits_is_refused_with_the_least_size(tmp_path):
    with pytest.raises(
        UserError, match=r"5 KB is out of reach: .* 4 bits it has [\d.]+ KB; ask for more, or prune first"
    ) as refused:
        decide({None: MODEL}, sized(5_000), MEASURING, tmp_path)
    least = float(re.search(r"it has ([\d.]+) KB", str(refused.value))[1])
    decide({None: MODEL}, sized(round(least * 1e3)), MEASURING, tmp_path)


def test_sets_are_measured_on_more_than_single_weights_are(tmp_path):
    more = replace(MEASURING, checked=FEEDS[1:])
    free = decide({None: MODEL}, scheme(), more, tmp_path)
    apart = np.mean([divergence(store(MODEL, free, more, tmp_path), feed) for feed in FEEDS[1:]])
    assert free.record.loss == pytest.approx(apart, rel=1e-3)
    decision = decide({None: MODEL}, scheme(allowed=apart / 3), more, tmp_path)
    same = decide({None: MODEL}, scheme(allowed=apart / 3), MEASURING, tmp_path)
    assert decision.record.kept
    harms = [{entry.name: entry.harm for entry in decided.record.kept} for decided in (decision, same)]
    common = harms[0].keys() & harms[1].keys()
    assert common  # measured on the short feeds either way
    assert [harms[0][name] for name in common] == pytest.approx([harms[1][name] for name in common])


def test_a_long_search_is_announced_by_what_a_run_took(tmp_path, monkeypatch, capsys):
    free = decide({None: MODEL}, scheme(), MEASURING, tmp_path).record.loss
    clock = [0.0]
    run = Probe._run

    def take_ten_seconds(*arguments):
        clock[0] += 10
        return run(*arguments)

    decider = Decider({None: MODEL}, scheme(allowed=free / 3), MEASURING, tmp_path)
    assert decider._probe  # the graph as it is runs once
    monkeypatch.setattr(progress, "now", lambda: clock[0])
    monkeypatch.setattr(Probe, "_run", take_ten_seconds)
    capsys.readouterr()
    decider.within_loss()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "runs of the graph" in line]
    runs, told = re.search(r"at most (\d+) runs of the graph: about (.*)$", line).groups()
    assert told == format_duration(10 * int(runs))
    assert clock[0] <= 10 * int(runs)


def test_grams_are_sums_of_products_of_inputs(tmp_path):
    grams = measure_grams(MODEL, FEEDS, tmp_path)
    table = MODEL.graph.initializers["table"].const_value.numpy()
    x = np.concatenate([table[feed["ids"].flatten()] for feed in FEEDS])
    assert np.allclose(grams["w"][0].numpy(), x.T @ x, rtol=1e-4, atol=1e-3)
    assert grams["w"][1] == len(x)
    assert "table" not in grams  # its rows are looked up too


@pytest.mark.parametrize("kind", ["blocks", "dynamic", "static"])
def test_nothing_is_written_but_in_the_folder_that_is_given(tmp_path, monkeypatch, kind):
    """Graphs lay in the system's temporary folder, where those of a killed run stayed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    (tmp_path / "scratch").mkdir()
    settings = scheme(kind, 4 if kind == "blocks" else 8, rounding="gptq" if kind == "blocks" else "nearest")
    store(MODEL, decide({None: MODEL}, settings, MEASURING, tmp_path / "scratch"), MEASURING, tmp_path / "scratch")
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_inputs_in_eight_bits(tmp_path, kind):
    same = Measuring(FEEDS[:1], FEEDS[:1], ("logits",), classes=True, what="random tokens")
    decision = decide({None: MODEL}, scheme(kind, 8), same, tmp_path)
    assert decision.record.weights == {"8-bit blocks": 1, "int8": 3}
    stored = store(MODEL, decision, same, tmp_path)
    there = operators(stored)
    assert there.count("MatMulInteger" if kind == "dynamic" else "QuantizeLinear") == 3
    codes = [v.const_value.numpy() for name, v in stored.graph.initializers.items() if name.endswith("_quantized")]
    assert {(int(array.min()), int(array.max())) for array in codes if array.dtype == np.int8} == {(-64, 64)}
    # Ranges of whole tensors, once for all or as they come, of the same tokens: what was measured, but for rounding,
    # which a few of these positions amplify.
    assert decision.record.loss / 3 < divergence(stored) < 3 * decision.record.loss


def test_products_that_lose_too_much_with_their_inputs_keep_them(tmp_path):
    decision = decide({None: MODEL}, scheme("dynamic", 8, allowed=0.0), MEASURING, tmp_path)
    assert decision.record.weights == {"8-bit blocks": 4}
    assert "MatMulInteger" not in operators(store(MODEL, decision, MEASURING, tmp_path))


def test_where_inputs_are_rounded_as_they_come_less_of_the_allowance_is_used(tmp_path):
    lost = decide({None: MODEL}, scheme("dynamic", 8), MEASURING, tmp_path).record.loss
    allowed = lost / 0.7  # between the shares of it
    assert decide({None: MODEL}, scheme("dynamic", 8, allowed=allowed), MEASURING, tmp_path).record.kept
    lost = decide({None: MODEL}, scheme(), MEASURING, tmp_path).record.loss
    assert not decide({None: MODEL}, scheme(allowed=lost / 0.7), MEASURING, tmp_path).record.kept


def test_without_anything_to_measure_on_all_are_stored_alike(tmp_path):
    decision = decide({None: MODEL}, scheme(rounding="gptq"), None, tmp_path)
    assert (decision.record.weights, decision.record.loss) == ({"4-bit blocks": 4}, None)
    assert decision.record.measured_on == "nothing: all weights are rounded alike"
