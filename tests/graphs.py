"""Tiny models and their graphs, each exported once for all tests of a run; tests copy what they break."""

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.collection import without_collection
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.onnx import export as exporting
from ckpt_prune.onnx.export import EMBEDDED_BYTES, GraphWriter
from ckpt_prune.options.graphs import GraphSettings
from tests import encoders, families
from tests.once import once, run_folder

Exported = Callable[..., tuple[Path, Path]]
Maker = Callable[[Path], Path]
"""Makes a model below a folder → the model's folder."""

DEEP, LAYERS = "llama-gqa-tied", 2
"""The variant that stands for what holds of one layer next to another, and its layers; all others have one.

Each more takes half as long to trace as the first with all around it.
"""


def make(folder: Path, variant: str, layers: int | None = None) -> Path:
    """Save a variant of `tests.families` or `tests.encoders` with few layers; where both have the name, of families.

    Args:
        folder: a new one.
        variant: its name.
        layers: None: as `DEEP` says.
    """
    with quiet_transformers():
        (families if variant in families.VARIANTS else encoders).make(folder, variant)
    return with_layers(folder, layers or (LAYERS if variant == DEEP else 1), of=families.BLOCKS)


def with_layers(folder: Path, layers: int, *, of: int) -> Path:
    """Cut a model in a folder down to its first layers."""
    encoders.edit_files(folder, partial(_shallow, layers, of))
    return folder


def _shallow(layers: int, of: int, tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    for key in ("stage_names", "out_features", "out_indices"):  # a backbone counts its layers there
        config.pop(key, None)
    gone = [f".{layer}." for layer in range(layers, of)]
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in gone)}


def exports(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Maker] | None = None) -> Exported:
    """(name, settings of the graph) → the model's folder and that of its graph, made when first asked for.

    `embedded` says above how many bytes weights go to a file of their own, as in `GraphWriter.write`. Nothing in
    either folder may be changed: copy it. The same for all rooms and all workers, whichever asks first.

    Args:
        tmp_path_factory: of the session.
        models: what is made otherwise than as a variant by `make`; a name always means the same model.
    """
    root = run_folder(tmp_path_factory) / "graphs"
    makers = models or {}

    @cache
    def model(name: str) -> Path:
        maker: Maker = makers.get(name, lambda place: make(place / name, name))
        return once(root / "models" / name, maker)

    @cache
    def export(name: str, *, embedded: int = EMBEDDED_BYTES, **settings: Any) -> tuple[Path, Path]:
        def write(place: Path) -> Path:
            with trace_as_commands_do(), pytest.MonkeyPatch.context() as patch:
                if embedded != EMBEDDED_BYTES:  # another place for the same graph
                    traced_before(patch, export(name, **settings)[1])
                writer = GraphWriter(Checkpoint.open(model(name)), place / name, GraphSettings(**settings))
                writer.write(embedded=embedded)
            return place / name

        description = repr((embedded, sorted(settings.items())))
        return model(name), once(root / f"{name}-{hashlib.sha256(description.encode()).hexdigest()[:12]}", write)

    return export


def traced_before(patch: pytest.MonkeyPatch, graph: Path) -> None:
    """Let the writer take the graph of this folder where it would trace the model: for tests of what comes after."""
    patch.setattr(exporting, "trace_model", lambda *_, **__: _whole(graph))


def traced_for_others(patch: pytest.MonkeyPatch, graph: Path) -> None:
    """The same for a model of the same shapes: its own weights stand in the graph."""

    def replace_weights(model: torch.nn.Module, *_: Any, **__: Any) -> onnx_ir.Model:
        graph_model, weights = _whole(graph), model.state_dict()
        placed = []
        for name, value in graph_model.graph.initializers.items():
            tensor = weights.pop(name.removesuffix(".T"), None)
            if tensor is not None:
                placed.append(tensor)
                array = (tensor.T if name.endswith(".T") else tensor).contiguous().numpy()
                assert value.const_value is not None
                assert array.shape == tuple(value.const_value.shape)
                value.const_value = onnx_ir.tensor(array, name=name)
        # Norms that are equal are in a graph once.
        assert all(any(torch.equal(tensor, other) for other in placed) for tensor in weights.values())
        return graph_model

    patch.setattr(exporting, "trace_model", replace_weights)


def traced_once(patch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Let modules that trace the same weights of the same config again have a copy of their first graph."""
    traced: dict[str, bytes] = {}
    trace = modules[0].trace_model

    def trace_anew(model: Any, *words: Any, **options: Any) -> onnx_ir.Model:
        weights = [(name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]
        options_read = {name: value for name, value in options.items() if name != "log"}
        key = repr((type(model), model.config.to_json_string(), words, options_read, weights))
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest not in traced:
            traced[digest] = onnx_ir.to_proto(trace(model, *words, **options)).SerializeToString()
        return onnx_ir.from_proto(onnx.load_model_from_string(traced[digest]))

    for module in modules:
        patch.setattr(module, "trace_model", trace_anew)


def graph_of(folder: Path) -> Path:
    """The only graph of a folder."""
    (file,) = folder.glob("*.onnx")
    return file


def _whole(graph: Path) -> onnx_ir.Model:
    """A graph with its weights in memory: its file may be replaced meanwhile."""
    onnx_model = onnx_ir.load(graph_of(graph))
    onnx_ir.external_data.load_to_model(onnx_model)
    return onnx_model


@contextmanager
def trace_as_commands_do() -> Iterator[None]:
    """Let whichever test asks first trace as commands do: in inference mode torch traces other operators.

    Garbage is not looked for meanwhile.
    """
    try:
        with without_collection(), torch.inference_mode(False):
            yield
    finally:
        # What tracing leaves in torch's caches stays: every later export would have it searched for garbage again.
        gc.collect()
        gc.freeze()
