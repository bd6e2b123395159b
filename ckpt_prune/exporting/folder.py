"""The folder a graph is deployed from, written whole or not at all."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import onnx_ir
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.jsonfile import pretty
from ckpt_prune.checkpoint.reading import CONFIG, Checkpoint
from ckpt_prune.checkpoint.staging import Staging, disk_failures
from ckpt_prune.checkpoint.writing import check_room
from ckpt_prune.checkpoint.written import EXPORT
from ckpt_prune.containers.side_files import carried, side_files, top_names
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.loading import load_model
from ckpt_prune.exporting.card import graph_card
from ckpt_prune.exporting.graph import DEFAULT_OPSET, build_graph
from ckpt_prune.exporting.manifest import Manifest, Source, ports, runtime_versions, tensor_digests
from ckpt_prune.exporting.session import DATA, GRAPH
from ckpt_prune.exporting.tasks import chosen_task, without_head
from ckpt_prune.exporting.tracing import example_of
from ckpt_prune.filenames import EXPORT_ERROR, GRAPH_RECORD, VALIDATION
from ckpt_prune.planning.export_recipe import GraphSettings
from ckpt_prune.progress import meter

_MADE = (GRAPH, DATA, CONFIG, GENERATION_CONFIG_NAME, GRAPH_RECORD, VALIDATION, "README.md")
EMBEDDED_BYTES = 1 << 30
"""Weights up to so many bytes stand in the graph's own file."""


def dtype_of(settings: GraphSettings) -> torch.dtype:
    """The type of a graph's weights."""
    return torch.float16 if settings.dtype == "fp16" else torch.float32


class GraphWriter:
    """Writes an export through `OUT.partial`.

    Creating the object checks the rules and writes nothing.

    Args:
        source: checkpoint that is exported.
        out: folder to make: outside the checkpoint, or a new one inside it.
        settings: what graph.
        overwrite: replace an existing export, and drop what a killed one left.

    Attributes:
        source: as given.
        out: as given.
        task: what the graph is for.

    Raises:
        UserError: OUT exists and may not be replaced, or holds the checkpoint; or the model cannot do the task.
    """

    def __init__(self, source: Checkpoint, out: Path, settings: GraphSettings, *, overwrite: bool = False) -> None:
        a, b = source.path.resolve(), out.resolve()
        if a == b or b in a.parents:
            raise UserError(f"output {out} holds the model {source.path}: choose another place, or a new folder inside")
        self.source, self.out, self._settings = source, out, settings
        self.task = chosen_task(source.config, task=settings.task, cache=settings.cache)
        self._staging = Staging(
            out,
            job="export",
            overwrite=overwrite,
            kind=EXPORT,
            wants=top_names(side_files(source.path)) | dict.fromkeys(_MADE),
        )

    def write(
        self,
        *,
        prove: Callable[[Path], bool] | None = None,
        trust: bool = False,
        embedded: int = EMBEDDED_BYTES,
    ) -> Manifest | None:
        """Trace the WHOLE model in memory and put the finished folder in place.

        Args:
            prove: is given the finished folder before it takes its place, and says whether it may.
            trust: run the checkpoint's own code, where it is not this tool's.
            embedded: weights above so many bytes go to a file of their own.

        Returns:
            The folder's record, or None where `prove` said no; then nothing is left.

        Raises:
            UserError: the model cannot be loaded or traced, or the disk is full.
        """
        dtype = dtype_of(self._settings)
        weights = sum(info.numel for info in self.source.tensors.values()) * dtype.itemsize
        check_room(self.out.absolute().parent, weights, "the graph needs")
        with self._staging:
            with meter(3, "exporting") as bar:
                bar.say("loading the model")
                model = load_model(self.source.path, device="cpu", dtype=dtype, trust_remote_code=trust, whole=True)
                bar.to(1)
                bar.say("tracing")
                graph = self._traced(model)
                bar.to(2)
                bar.say("writing")
                with disk_failures(self._staging.path):
                    generation = getattr(model, "generation_config", None)
                    manifest = self._fill(self._staging.path, graph, generation, embedded, prove is not None)
                bar.to(3)
            _let_go(graph, model)
            del graph, model
            if prove is not None and not prove(self._staging.path):
                return None
            self._staging.publish()
        return manifest

    def _fill(
        self, folder: Path, graph: onnx_ir.Model, generation: GenerationConfig | None, embedded: int, proved: bool
    ) -> Manifest:
        source, settings, task = self.source, self._settings, self.task
        weights = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value is not None)
        onnx_ir.save(graph, folder / GRAPH, external_data=DATA if weights > embedded else None)
        for name, path in carried(source).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
        # The code it names does not travel: the graph needs none.
        config = {key: value for key, value in source.config.items() if key != "auto_map"}
        (folder / CONFIG).write_text(pretty(config), encoding="utf-8")
        if task.name == "text-generation" and generation and not (folder / GENERATION_CONFIG_NAME).is_file():
            generation.save_pretrained(folder)
        manifest = Manifest(
            versions=runtime_versions(),
            source=Source(name=source.name, fingerprint=source.fingerprint),
            task=task.name,
            modality=task.modality,
            cached=task.cached,
            dtype=settings.dtype,
            opset=graph.opset_imports[""],
            optimize=settings.optimize,
            inputs=ports(graph.graph.inputs),
            outputs=ports(graph.graph.outputs),
            files=sha256_files(folder, _files(folder)),
            tensors=tensor_digests(graph),
        )
        (folder / GRAPH_RECORD).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(graph_card(manifest, config, proved=proved), encoding="utf-8")
        return manifest

    def _traced(self, model: PreTrainedModel) -> onnx_ir.Model:
        module = without_head(model, self.task)
        log = self.out.absolute().with_name(f"{self.out.name}{EXPORT_ERROR}")
        graph = build_graph(
            module,
            example_of(module, self.task),
            self.task,
            opset=self._settings.opset or DEFAULT_OPSET,
            fusions=None if self._settings.optimize == "none" else self._settings.optimize,
            log=log,
        )
        log.unlink(missing_ok=True)  # of an earlier attempt
        return graph


def _files(folder: Path) -> list[str]:
    """Names below a folder of all files that are not hidden, sorted."""
    shown = (path for path in folder.iterdir() if not path.name.startswith("."))
    found = (inner for path in shown for inner in (path.iterdir() if path.is_dir() else [path]))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _let_go(graph: onnx_ir.Model, model: PreTrainedModel) -> None:
    """Free the weights, before the model is loaded again to be compared with.

    Caches of torch's and of onnxscript's keep graph and model as long as the process lives.
    """
    for value in graph.graph.initializers.values():
        value.const_value = None
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    gc.collect()


def graph_bytes(folder: Path) -> int:
    """Size of an exported graph with its weights."""
    return sum((folder / name).stat().st_size for name in (GRAPH, DATA) if (folder / name).is_file())
