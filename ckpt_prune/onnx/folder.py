"""The folder a graph is deployed from, written whole or not at all."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import onnx_ir
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.checkpoint.staging import Staging, disk_failures
from ckpt_prune.checkpoint.writer import check_free_space
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import EXPORT_ERROR, GENAI, GRAPH_RECORD, VALIDATION
from ckpt_prune.common.graph_types import ROUNDED_TYPES, GraphType
from ckpt_prune.common.progress import meter
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.model.containers.side_files import carried_files, find_side_files, top_names
from ckpt_prune.modeling_pruned import WEIGHTS_KEY
from ckpt_prune.onnx.card import graph_card
from ckpt_prune.onnx.genai import genai_config
from ckpt_prune.onnx.graph import DEFAULT_OPSET, build_graph
from ckpt_prune.onnx.manifest import GraphEntry, Manifest, Source, ports, runtime_versions, tensor_digests
from ckpt_prune.onnx.outcome import ProofSamples
from ckpt_prune.onnx.quantization.deciding import Decision, Measuring, decide, store
from ckpt_prune.onnx.rounding import check_blocks, measuring_of, scheme_of
from ckpt_prune.onnx.session import DATA, FILES
from ckpt_prune.onnx.tasks import check_padding, chosen_task, without_head
from ckpt_prune.onnx.tracing import example_of, image_size
from ckpt_prune.options.graphs import GraphSettings

_MADE = (
    *FILES.values(),
    *(f"{file}{DATA}" for file in FILES.values()),
    CONFIG,
    GENERATION_CONFIG_NAME,
    GENAI,
    GRAPH_RECORD,
    VALIDATION,
    "README.md",
)
EMBEDDED_BYTES = 1 << 30
"""Weights up to so many bytes stand in the graph's own file."""


BITS: dict[GraphType, float] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4.5, "q4f16": 4.5}
"""Of a weight, scales and zeros of blocks included."""


def graphs_bytes(settings: GraphSettings, parameters: int) -> int:
    """Size of the graphs of so many parameters, about."""
    return round(sum(BITS[dtype] for dtype in settings.dtype) * parameters / 8)


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
        self.task = chosen_task(source.config, folder=source.path, task=settings.task, cache=settings.cache)
        check_padding(source.config, self.task)
        self._staging = Staging(
            out,
            job="export",
            overwrite=overwrite,
            kind=EXPORT_KIND,
            wants=top_names(find_side_files(source.path)) | dict.fromkeys(_MADE),
        )

    def write(
        self,
        *,
        prove: Callable[[Path], bool] | None = None,
        measured: ProofSamples | None = None,
        trust: bool = False,
        embedded: int = EMBEDDED_BYTES,
    ) -> Manifest | None:
        """Trace the WHOLE model in memory and put the finished folder in place.

        Args:
            prove: is given the finished folder before it takes its place, and says whether it may.
            measured: what rounding is measured on; None: all weights are rounded alike.
            trust: run the checkpoint's own code, where it is not this tool's.
            embedded: weights above so many bytes go to a file of their own.

        Returns:
            The folder's record, or None where `prove` said no; then nothing is left.

        Raises:
            UserError: the model cannot be loaded or traced, or changes meanwhile, the disk is full, or a block size
                does not divide.
        """
        parameters = sum(info.numel for info in self.source.tensors.values())
        needed = graphs_bytes(self._settings, parameters)
        check_free_space(self.out.absolute().parent, needed, "the graph needs")
        with self._staging:
            folder = self._staging.path
            entries: dict[GraphType, GraphEntry] = {}
            decisions: dict[GraphType, Decision] = {}
            for kind in (torch.float32, torch.float16):
                wanted = [dtype for dtype in self._settings.dtype if _traced_in(dtype) == kind]
                # What becomes of a weight is measured in float32, whatever it is computed in later.
                decided = [dtype for dtype in ROUNDED_TYPES if dtype in self._settings.dtype and kind == torch.float32]
                if not wanted and not decided:
                    continue
                with meter(2, "exporting") as bar:
                    bar.say("loading the model")
                    model = load_model(self.source.path, device="cpu", dtype=kind, trust_remote_code=trust, whole=True)
                    bar.to(1)
                    bar.say("tracing")
                    graph = self._traced(model)
                    bar.to(2)
                generation, own = getattr(model, "generation_config", None), model.config.get_text_config()
                measuring = self._measuring(graph, model, measured) if decided and measured is not None else None
                for dtype in decided:
                    decisions[dtype] = self._decided(graph, dtype, measured, measuring, decisions)
                for dtype in wanted:
                    stored = store(graph, decisions[dtype], measuring, folder) if dtype in decisions else graph
                    with disk_failures(folder):
                        entries[dtype] = _save(stored, folder, dtype, embedded, decisions.get(dtype))
                _let_go(graph, model)
                del graph, model
            with disk_failures(folder):
                graphs = [entries[each] for each in self._settings.dtype]
                manifest = self._fill(folder, graphs, own, generation, prove is not None)
            proved = prove is None or prove(folder)
            # What is proved is read from the source anew: another model there says nothing of the graph.
            self.source.check_unchanged([*self.source.files, CONFIG])
            if not proved:
                return None
            self._staging.publish()
        return manifest

    def _measuring(self, graph: onnx_ir.Model, model: PreTrainedModel, samples: ProofSamples) -> Measuring:
        config = model.config.get_text_config()
        size = (0, 0, 0)
        if self.task.modality == "image":
            size = (getattr(model.config, "num_channels", 3), *image_size(model.config))
        return measuring_of(graph, self.task, samples, getattr(config, "vocab_size", 0), size)

    def _decided(
        self,
        graph: onnx_ir.Model,
        dtype: GraphType,
        samples: ProofSamples | None,
        measuring: Measuring | None,
        earlier: dict[GraphType, Decision],
    ) -> Decision:
        """What becomes of the weights; int4 and q4f16 differ in what is computed in, not in that."""
        check_blocks(graph, self._settings)
        if dtype == "q4f16" and "int4" in earlier:
            return earlier["int4"]
        ranges = samples is not None and samples.images is not None
        return decide(graph, scheme_of(dtype, self._settings, self.task, ranges=ranges), measuring, self._staging.path)

    def _fill(
        self,
        folder: Path,
        graphs: list[GraphEntry],
        own: PreTrainedConfig,
        generation: GenerationConfig | None,
        proved: bool,
    ) -> Manifest:
        source, settings, task = self.source, self._settings, self.task
        for name, path in carried_files(source).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
        carried_files(source)  # raises where one changed while it was copied
        # The code it names does not travel: the graph needs none.
        config = {key: value for key, value in source.config.items() if key not in ("auto_map", WEIGHTS_KEY)}
        (folder / CONFIG).write_text(pretty_json(config), encoding="utf-8")
        if task.name == "text-generation" and generation and not (folder / GENERATION_CONFIG_NAME).is_file():
            generation.save_pretrained(folder)
        genai = genai_config(graphs, task, own, generation)
        if isinstance(genai, dict):
            (folder / GENAI).write_text(pretty_json(genai), encoding="utf-8")
        manifest = Manifest(
            versions=runtime_versions(),
            source=Source(name=source.name, fingerprint=source.fingerprint),
            task=task.name,
            modality=task.modality,
            cached=task.cached,
            optimize=settings.optimize,
            files=sha256_files(folder, _files(folder)),
            graphs=graphs,
        )
        (folder / GRAPH_RECORD).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(graph_card(manifest, config, proved=proved, genai=genai), encoding="utf-8")
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


def _traced_in(dtype: GraphType) -> torch.dtype:
    """What a model computes in where a graph of this type is traced: itself it knows what stays in float32."""
    return torch.float16 if dtype in ("fp16", "q4f16") else torch.float32


def _save(graph: onnx_ir.Model, folder: Path, dtype: GraphType, embedded: int, decision: Decision | None) -> GraphEntry:
    file = FILES[dtype]
    weights = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value is not None)
    onnx_ir.save(graph, folder / file, external_data=f"{file}{DATA}" if weights > embedded else None)
    return GraphEntry(
        file=file,
        dtype=dtype,
        opset=graph.opset_imports[""],
        inputs=ports(graph.graph.inputs),
        outputs=ports(graph.graph.outputs),
        tensors=tensor_digests(graph),
        quantised=None if decision is None else decision.record,
    )


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


def graph_bytes(folder: Path, file: str) -> int:
    """Size of an exported graph with its weights."""
    return sum((folder / name).stat().st_size for name in (file, f"{file}{DATA}") if (folder / name).is_file())
