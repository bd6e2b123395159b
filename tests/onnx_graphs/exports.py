"""Graphs run by onnxruntime alone, the stock model they are held against, and outputs of this tool to export."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from ckpt_prune.evaluation.whole_model import load_reported, quiet_transformers
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.records import read_manifest
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.stages.recipe_files import load_recipe
from tests import encoders, families, graphs
from tests.families import prune
from tests.graphs import graph_of
from tests.stages.test_rotations import random_rotations, rotating

Array = NDArray[Any]
Feed = dict[str, Array]

WINDOW = 6
"""Tokens that the windowed mistral's attention looks back on, itself included."""


# ---- models and their graphs ---------------------------------------------------------------------------------------


def _write_windowed(root: Path) -> Path:
    """A mistral whose attention looks at `WINDOW` tokens."""
    sizes = families.SIZES | {"head_dim": 6, "sliding_window": WINDOW, "num_hidden_layers": 1}
    model = transformers.MistralForCausalLM(AutoConfig.for_model("mistral", **sizes)).eval()
    encoders.randomise(model, 3)
    with quiet_transformers():
        model.save_pretrained(root / "window")
    families.tiny_tokenizer().save_pretrained(root / "window")
    return root / "window"


def _two_heads(root: Path) -> Path:
    """A BERT as it is pre-trained, which says which of its heads it has."""
    folder = graphs.make(root / "bert-pretraining", "bert-pretraining")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForPreTraining"]}))
    return folder


def _write_uneven(root: Path) -> Path:
    """A llama whose blocks have widths of their own, and so has its cache."""
    dense = graphs.make(root / "llama-gqa-tied", "llama-gqa-tied")
    statistics = families.calibrate(dense, root / "statistics")
    prune(families.job_on(dense, load_recipe("flap-global", ratio=0.3), statistics), root / "uneven")
    return root / "uneven"


def _build_pruned_maker(variant: str, ratios: dict[str, float], container: str) -> graphs.Maker:
    def make(root: Path) -> Path:
        dense = graphs.make(root / variant, variant)
        statistics = encoders.calibrate(
            dense, root / "statistics", encoders.samples(variant), collect=encoders.FOR_CORP
        )
        prune(encoders.job_on(dense, encoders.recipe(ratios, container=container), statistics), root / "pruned")
        return root / "pruned"

    return make


def _one_layer(variant: str) -> graphs.Maker:
    return lambda root: graphs.make(root / variant, variant, 1)


def _write_rotated(variant: str, kind: str) -> graphs.Maker:
    def make(root: Path) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            random_rotations(patch)
            # Of one layer: a tied head has its stream turned on entering a block and on leaving it.
            prune(encoders.job_on(graphs.make(root / variant, variant, 1), rotating(kind)), root / "rotated")
        return root / "rotated"

    return make


MODELS: dict[str, graphs.Maker] = {
    "mistral-window": _write_windowed,
    "bert-two-heads": _two_heads,
    "uneven-llama": _write_uneven,
    "narrow-vit": _build_pruned_maker("vit", {"qk": 0.5, "heads": 0.25, "mlp": 0.25}, "remote"),
    "narrow-opt": _build_pruned_maker("opt", {"qk": 0.5, "heads": 0.25, "mlp": 0.25}, "remote"),
    "turned-llama": _write_rotated("llama-gqa-tied", "per-layer"),
    "rotated-llama": _write_rotated("llama", "shared"),
    "shallow-llama-gqa-tied": _one_layer("llama-gqa-tied"),
}
"""Every kind of output of this tool, and what no variant is."""


def make_exports(tmp_path_factory: pytest.TempPathFactory) -> graphs.Exported:
    """Export graphs as `tests.graphs.exports` does, and those of `MODELS` too."""
    return graphs.exports(tmp_path_factory, MODELS)


def in_pytorch(folder: Path) -> PreTrainedModel:
    """The model in PyTorch, float32: by transformers, or by this package where its blocks differ. Nothing is left out.

    Which of both `load_reported` takes, other tests hold against stock transformers and against models run elsewhere.
    """
    model, report = load_reported(folder, dtype=torch.float32)
    assert report.clean, report
    return model.eval()


# ---- both run ----------------------------------------------------------------------------------------------------


class Graph:
    """A graph in plain onnxruntime.

    Attributes:
        inputs, outputs: names, in the graph's order.
    """

    def __init__(self, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(graph_of(folder)), options, providers=["CPUExecutionProvider"])
        self._types = {port.name: port.type for port in self._session.get_inputs()}
        self.inputs = list(self._types)
        self.outputs = [port.name for port in self._session.get_outputs()]

    def __call__(self, feed: Feed) -> Feed:
        """Every output, given no more than the graph has inputs for."""
        given = {name: np.ascontiguousarray(feed[name]).astype(self._dtype(name)) for name in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, given), strict=True))

    def no_past(self, batch: int) -> Feed:
        """Keys and values of no tokens."""
        past = {}
        for port in self._session.get_inputs():
            if port.name.startswith("past_key_values."):
                _, heads, _, width = port.shape
                past[port.name] = np.zeros((batch, heads, 0, width), self._dtype(port.name))
        return past

    @property
    def cached(self) -> bool:
        """Whether keys and values go in."""
        return any(name.startswith("past_key_values.") for name in self.inputs)

    def _dtype(self, name: str) -> Any:
        return {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}[
            self._types[name]
        ]


@dataclass(frozen=True)
class Text:
    """A batch of random tokens, (B, T), 1 in `mask` where one is text and 0 where it is padding."""

    ids: Array
    mask: Array

    @classmethod
    def random(cls, batch: int, length: int, *, side: str = "none", seed: int = 0) -> "Text":
        """The first text is as long as the batch, the last has one token at least and padding to its other end."""
        rng = np.random.default_rng([seed, batch, length])
        ids = rng.integers(3, families.VOCAB, (batch, length))
        mask = np.ones_like(ids)
        for row in range(1, batch if side != "none" else 1):
            padding = row * (length - 1) // batch
            mask[row, slice(padding) if side == "left" else slice(length - padding, length)] = 0
        return cls(ids, mask)

    @property
    def positions(self) -> Array:
        """The position of each token among those of its text, and 0 for padding before it."""
        counted = np.zeros_like(self.ids)
        for row, kept in enumerate(self.mask):
            place = 0
            for column, here in enumerate(kept):
                counted[row, column] = place
                place += int(here)
        return counted

    def feed(self, start: int, end: int) -> Feed:
        """Inputs for some of the tokens, those before them being in the cache."""
        ids = self.ids[:, start:end]
        return {
            "input_ids": ids,
            "attention_mask": self.mask[:, :end],
            "position_ids": self.positions[:, start:end],
            "token_type_ids": np.zeros_like(ids),
        }


@torch.inference_mode()
def expected_of(module: Any, feed: Feed, names: Sequence[str]) -> dict[str, Tensor]:
    """Run PyTorch on the same inputs, with no graph and no cache going in, and return the outputs of these names."""
    takes = inspect.signature(module.forward).parameters
    inputs = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in feed.items()}
    inputs = {name: value for name, value in inputs.items() if name in takes}
    if not getattr(module.config, "type_vocab_size", None):
        inputs.pop("token_type_ids", None)  # GPT-2 adds the embedding of the token of that number
    cache = DynamicCache()
    cached = any(name.startswith("present.") for name in names)
    options = {cache_argument(module.forward): cache, "use_cache": True} if cached else {}
    returned = module(**inputs, **options)
    tensors = {name: value for name, value in returned.items() if isinstance(value, Tensor)}
    for index, layer in enumerate(cache.layers):
        tensors |= {f"present.{index}.key": layer.keys, f"present.{index}.value": layer.values}
    return {name: tensors[name] for name in names}


def assert_stated(folder: Path, settings: GraphSettings) -> None:
    """The opset and the operators that were asked for."""
    stated = onnx.load(graph_of(folder))
    assert {opset.domain: opset.version for opset in stated.opset_import}[""] == (settings.opset or 20)
    domains = {node.domain for node in stated.graph.node} - {""}
    assert domains == (set() if settings.optimize == "none" else {"com.microsoft"})


def assert_near(name: str, ours: Array, theirs: Tensor, limit: float, mask: Array | None = None) -> None:
    """Every element within `limit` times the largest of PyTorch's.

    Args:
        name: of the output.
        ours: of onnxruntime.
        theirs: of PyTorch, of the same shape.
        limit: see above.
        mask: (B, T), 0 where a token is padding and nothing is said; None where there is none.
    """
    assert ours.shape == tuple(theirs.shape), name
    a, b = ours.astype(np.float64), theirs.double().numpy()
    if mask is not None:
        if name.startswith("present."):  # (B, heads, T, width)
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        a, b = a[mask == 1], b[mask == 1]
    assert np.isfinite(a).all(), name
    # Random weights: an output that says nothing would hide everything.
    assert b.std() > 1e-3, name
    assert np.abs(a - b).max() <= limit * np.abs(b).max(), (name, np.abs(a - b).max() / np.abs(b).max())


def assert_reads(graph: Graph, module: Any, text: Text, limit: float) -> None:
    """One pass over whole texts."""
    feed = text.feed(0, text.ids.shape[1])
    outputs = graph(feed | graph.no_past(len(text.ids)))
    for name, theirs in expected_of(module, feed, graph.outputs).items():
        per_token = theirs.dim() > 2
        assert_near(name, outputs[name], theirs, limit, text.mask if per_token else None)


def assert_reads_in_chunks(graph: Graph, module: Any, text: Text, chunks: Sequence[int], limit: float) -> None:
    """Through the cache, from an empty one: as if it had been one pass."""
    length = text.ids.shape[1]
    assert sum(chunks) == length
    past, start, pieces = graph.no_past(len(text.ids)), 0, []
    for size in chunks:
        outputs = graph(text.feed(start, start + size) | past)
        start += size
        pieces.append(outputs["logits"])
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    present = {name.replace("past_key_values", "present"): value for name, value in past.items()}
    joined = {"logits": np.concatenate(pieces, 1)} | present
    for name, theirs in expected_of(module, text.feed(0, length), graph.outputs).items():
        assert_near(name, joined[name], theirs, limit, text.mask)


def pixels(batch: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, batch]).standard_normal((batch, 3, encoders.IMAGE, encoders.IMAGE), np.float32)


def ports_of(folder: Path) -> dict[str, tuple[str, list[Any]]]:
    """Input or output → type and shape, as the record has them."""
    manifest = read_manifest(folder)
    return {port.name: (port.type, port.shape) for port in (*manifest.inputs, *manifest.outputs)}
