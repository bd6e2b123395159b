"""Exporting a model: the folder a graph is deployed from, written whole or not at all, and only if it is proved."""

import gc
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import onnx_ir
import torch
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.disk_space import check_free_space
from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.checkpoint.side_files import carried_files, name_left_out, side_files_of, top_names
from ckpt_prune.checkpoint.staging import Staging, disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import EXPORT_ERROR, GENAI, GRAPH_RECORD, VALIDATION
from ckpt_prune.common.graph_types import ROUNDED_TYPES, GraphType, all_graph_files, name_graph
from ckpt_prune.common.memory import return_freed_memory
from ckpt_prune.common.progress import Notices, meter
from ckpt_prune.evaluation.sentences import open_embedder
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.report import Loss
from ckpt_prune.measure.samples.image_files import ImageSplit
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.containers.remote import MLX_KEY
from ckpt_prune.model.context import context_length
from ckpt_prune.model.skeleton import RefusedConfigError, parse_config
from ckpt_prune.modeling_pruned import WEIGHTS_KEY
from ckpt_prune.onnx.card import make_card, make_genai_config
from ckpt_prune.onnx.pairs import make_noise_pairs
from ckpt_prune.onnx.proof import Dense, validate
from ckpt_prune.onnx.quantization.deciding import (
    Decision,
    Measuring,
    check_block_size,
    check_rounding,
    decide,
    make_measuring,
    make_scheme,
    store,
)
from ckpt_prune.onnx.quantization.joining import Graphs
from ckpt_prune.onnx.records import (
    GraphEntry,
    GraphSource,
    Manifest,
    Validation,
    Validations,
    describe_ports,
    hash_tensors,
    read_manifest,
    runtime_versions,
)
from ckpt_prune.onnx.reference import drop_weights
from ckpt_prune.onnx.samples import FEW_WINDOWS, WINDOWS, ProofSamples, choose_proof_samples
from ckpt_prune.onnx.session import DATA, Provider, default_provider
from ckpt_prune.onnx.tasks import GraphTask, check_padding, choose_task, remove_head
from ckpt_prune.onnx.tracing import get_image_size, trace_model
from ckpt_prune.onnx.writing import write_graph
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.options.graphs import GraphSettings

_OWN_FILES = (
    *all_graph_files(),
    *(f"{file}{DATA}" for file in all_graph_files()),
    *(CONFIG, GENERATION_CONFIG_NAME, GENAI, GRAPH_RECORD, VALIDATION, "README.md"),
)
EMBEDDED_BYTES = 1 << 30
"""Weights up to so many bytes stand in the graph's own file."""
BITS: dict[GraphType, float] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4.5, "q4f16": 4.5}
"""Bits of a weight, the scales and zeros of its block included."""


def estimate_graphs_bytes(settings: GraphSettings, parameters: int) -> int:
    return round(sum(BITS[dtype] for dtype in settings.graph_types) * parameters / 8)


def count_graph_bytes(folder: Path, file: str) -> int:
    return sum((folder / name).stat().st_size for name in (file, f"{file}{DATA}") if (folder / name).is_file())


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        path: the folder that was to be written.
        manifest: the folder's record; None if the graph did not pass, and nothing is left.
        validation: the comparison with PyTorch; None if it was not asked for.
        bytes: of each graph with its weights, by its type; empty if nothing is left.
    """

    format: ClassVar[str] = "onnx"
    path: Path
    manifest: Manifest | None
    validation: Validations | None
    bytes: dict[GraphType, int]

    @property
    def passed(self) -> bool:
        return self.manifest is not None

    @property
    def losses(self) -> list[Loss]:
        """Losses of each graph beside its own model, and beside a dense one, with verdicts."""
        graphs = [] if self.validation is None else self.validation.graphs
        return [loss for graph in graphs for loss in graph.losses()]

    def data(self) -> dict[str, Any]:
        return {
            "written": self.passed,
            "out": str(self.path),
            "bytes": self.bytes,
            "manifest": None if self.manifest is None else self.manifest.model_dump(),
            "validation": None if self.validation is None else self.validation.model_dump(),
            "losses": [loss.model_dump() for loss in self.losses],
        }


class GraphWriter:
    """Writes an export through `OUT.partial`. Creating the object checks the rules and writes nothing.

    Args:
        source: checkpoint that is exported.
        out: folder to make: outside the checkpoint, or a new one inside it.
        overwrite: replace an existing export, and drop what a killed one left.
    """

    def __init__(self, source: Checkpoint, out: Path, settings: GraphSettings, *, overwrite: bool = False) -> None:
        a, b = source.path.resolve(), out.resolve()
        if a == b or b in a.parents:
            raise UserError(f"output {out} holds the model {source.path}: choose another place, or a new folder inside")
        self.source, self.out, self._settings = source, out, settings
        self.task = choose_task(source.config, folder=source.path, task=settings.task, cache=settings.cache)
        check_padding(source.config, self.task)
        self._staging = Staging(
            out,
            job="export",
            overwrite=overwrite,
            kind=EXPORT_KIND,
            wants=top_names(side_files_of(source).files) | dict.fromkeys(_OWN_FILES),
        )

    def write(
        self,
        *,
        prove: Callable[[Path], bool] | None = None,
        samples: ProofSamples | None = None,
        trust: bool = False,
        embedded: int = EMBEDDED_BYTES,
    ) -> Manifest | None:
        """Trace the WHOLE model in memory and put the finished folder in place.

        Args:
            prove: is given the finished folder before it takes its place, and says whether it may.
            samples: what rounding is measured on; None: all weights are rounded alike.
            embedded: weights above so many bytes go to a file of their own.

        Returns:
            The folder's record, or None if `prove` said no; then nothing is left.
        """
        settings = self._settings
        parameters = sum(info.numel for info in self.source.tensors.values())
        check_free_space(self.out.absolute().parent, estimate_graphs_bytes(settings, parameters), "the graph needs")
        with self._staging:
            folder = self._staging.path
            entries: dict[GraphType, list[GraphEntry]] = {dtype: [] for dtype in settings.graph_types}
            decisions: dict[GraphType, Decision] = {}
            for kind in (torch.float32, torch.float16):
                types = [dtype for dtype in settings.graph_types if _tracing_type(dtype) == kind]
                # What becomes of a weight is measured in float32, whatever it is computed in later.
                rounded = [dtype for dtype in ROUNDED_TYPES if dtype in settings.dtype and kind == torch.float32]
                if not types and not rounded:
                    continue
                with meter(2, "exporting") as bar:
                    bar.say("loading the model")
                    model = load_model(
                        self.source.whole, device="cpu", dtype=kind, trust_remote_code=trust, whole=True, unpack=True
                    )
                    bar.to(1)
                    bar.say("tracing")
                    graphs = {task.stack: self._trace(model, task) for task in self.task.graphs}
                    bar.to(2)
                generation, config = getattr(model, "generation_config", None), model.config.get_text_config()
                measuring = None
                if rounded and samples is not None:
                    measuring = measure_for(model, graphs, self.task, samples, self.source.whole)
                for dtype in rounded:
                    check_block_size(graphs, settings)
                    if dtype == "q4f16" and "int4" in decisions:  # they differ in what is computed in
                        decisions[dtype] = decisions["int4"]
                        continue
                    ranges = samples is not None and samples.images is not None
                    dense = sum(info.nbytes for info in self.source.tensors.values())
                    scheme = make_scheme(dtype, settings, self.task, ranges=ranges, dense=dense)
                    decisions[dtype] = decide(graphs, scheme, measuring, folder)
                for dtype in types:
                    decision = decisions.get(dtype)
                    entries[dtype] = save_entries(
                        graphs, folder, dtype, decision, measuring, scratch=folder, embedded=embedded
                    )
                _free(graphs.values(), model)
                del graphs, model
            with disk_failures(folder):
                written = [entry for dtype in settings.graph_types for entry in entries[dtype]]
                proved, optimize = prove is not None, self._settings.optimize
                manifest, describe = complete_folder(
                    folder, self.source, self.task, written, config, generation, optimize=optimize
                )
                self._describe = partial(describe, proved=proved)
                self.write_card(folder, manifest)
            passed = prove is None or prove(folder)
            # The proof reads the source again: if it changed, the proof says nothing of the graph.
            self.source.check_unchanged()
            if not passed:
                return None
            self._staging.publish()
        return manifest

    def _trace(self, model: PreTrainedModel, task: GraphTask) -> onnx_ir.Model:
        log = self.out.absolute().with_name(f"{self.out.name}{EXPORT_ERROR}")
        fusions = None if self._settings.optimize == "none" else self._settings.optimize
        graph = trace_model(remove_head(model, task), task, opset=self._settings.opset, fusions=fusions, log=log)
        log.unlink(missing_ok=True)  # of an earlier attempt
        return graph

    def write_card(self, folder: Path, manifest: Manifest, validations: Sequence[Validation] = ()) -> None:
        """Write README.md, once more when it is known what the graphs lose."""
        (folder / "README.md").write_text(self._describe(manifest, validations=validations), encoding="utf-8")


def complete_folder(
    folder: Path,
    source: Checkpoint,
    task: GraphTask,
    graphs: list[GraphEntry],
    text_config: Any,
    generation: Any,
    *,
    optimize: Literal["cpu", "cuda", "none"] = "none",
) -> tuple[Manifest, Callable[..., str]]:
    """Write all but the card into a folder that holds a checkpoint's graphs.

    Args:
        text_config: transformers' config object of the text model.
        generation: transformers' generation config, or None.

    Returns:
        The folder's record, and `make_card` of this folder, to be called with the record and what was measured.
    """
    carried = carried_files(source)
    for name, path in carried.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(path.read_bytes())
    carried_files(source)  # raises if one changed while it was copied
    external = [graph.file for graph in graphs if (folder / (graph.file + DATA)).is_file()]
    config = make_graph_config(source.config, external)
    (folder / CONFIG).write_text(pretty_json(config), encoding="utf-8")
    generates = task.name == "text-generation" or task.modality == "pairs"
    if generates and generation and not (folder / GENERATION_CONFIG_NAME).is_file():
        generation.save_pretrained(folder)
    genai = make_genai_config(graphs, task, text_config, generation)
    if isinstance(genai, dict):
        (folder / GENAI).write_text(pretty_json(genai), encoding="utf-8")
    written = {*carried, CONFIG, GENERATION_CONFIG_NAME, GENAI, *(graph.file for graph in graphs)}
    written |= {f"{name}{DATA}" for name in external}
    manifest = Manifest(
        versions=runtime_versions(),
        # By its files: the config of a class that nobody describes also holds what was found of it.
        source=GraphSource(name=source.name, fingerprint=Checkpoint.open(source.path, packed=True).fingerprint),
        task=task.name,
        modality=task.modality,
        cached=task.cached,
        optimize=optimize,
        files=sha256_files(folder, sorted(name for name in written if (folder / name).is_file())),
        graphs=graphs,
    )
    (folder / GRAPH_RECORD).write_text(json.dumps(manifest.model_dump(), indent=2) + "\n", encoding="utf-8")
    return manifest, partial(make_card, config=config, folder=folder, genai=genai)


def make_graph_config(config: dict[str, Any], external: Sequence[str]) -> dict[str, Any]:
    """Return config.json of an exported folder.

    The code that the source's names does not travel: a graph needs none. transformers.js chooses a class by the
    `model_type`, and has none of the name seed_oss, as which Llamas are stored whose head count or biases their own
    config class refuses.

    Args:
        config: of the source.
        external: graphs whose weights lie in a file beside them, which transformers.js must be told.
    """
    values = {key: value for key, value in config.items() if key not in ("auto_map", WEIGHTS_KEY, MLX_KEY)}
    if values.get("model_type") == "seed_oss":
        values |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        try:
            parse_config(values)
        except RefusedConfigError:  # heads that do not divide the hidden size
            values |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    if external:
        values["transformers.js_config"] = {"use_external_data_format": dict.fromkeys(external, 1)}
    return values


def _tracing_type(dtype: GraphType) -> torch.dtype:
    """Return the dtype that a model is traced in. One in float16 says itself what it computes in float32."""
    return torch.float16 if dtype in ("fp16", "q4f16") else torch.float32


def measure_for(
    model: PreTrainedModel, graphs: Graphs, task: GraphTask, samples: ProofSamples, folder: Path
) -> Measuring:
    """Return what rounding of a model's graphs is measured on; `folder` is the model's."""
    size, pool = (0, 0, 0), None
    if task.modality == "image":
        size = (getattr(model.config, "num_channels", 3), *get_image_size(model.config, task))
    if task.name == "feature-extraction" and find_sentence_use(folder) == "sentence-similarity":
        with suppress(UserError):  # of all hidden states then
            pool = open_embedder(model, folder, load_tokenizer(folder)).pool
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0)
    if task.modality == "pairs" and samples.for_rounding is None:
        context = context_length(model.config.get_text_config(decoder=True))
        samples = replace(samples, for_rounding=make_noise_pairs(model.config, context, samples.seed))
    return make_measuring(graphs, task, samples, vocabulary, size, pool)


def _save_graph(graph: onnx_ir.Model, place: Path, embedded: int) -> None:
    """Write a graph, its weights in a file beside it if they have more than so many bytes."""
    weights = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value is not None)
    if weights > embedded:
        onnx_ir.save(graph, place, external_data=f"{place.name}{DATA}")
    else:
        write_graph(graph, place)


def save_entries(
    graphs: Graphs,
    folder: Path,
    dtype: GraphType,
    decision: Decision | None,
    measuring: Measuring | None,
    *,
    scratch: Path,
    embedded: int = EMBEDDED_BYTES,
) -> list[GraphEntry]:
    """Write the graphs of a model, weights stored as was decided, and return their entries in the folder's record.

    Args:
        graphs: those that were decided on, or the same traced in float16.
        decision: None: all weights stay as they are.
        measuring: what `store` needs.
        scratch: folder for copies of the graphs meanwhile.
        embedded: weights above so many bytes go to a file of their own.
    """
    entries = []
    for stack, graph in graphs.items():
        own, file = None if decision is None else decision.of(stack), name_graph(dtype, stack)
        stored = graph if own is None else store(graph, own, measuring, scratch)
        with disk_failures(folder):
            _save_graph(stored, folder / file, embedded)
            entry = GraphEntry(
                file=file,
                dtype=dtype,
                stack=stack,
                opset=stored.opset_imports[""],
                inputs=describe_ports(stored.graph.inputs),
                outputs=describe_ports(stored.graph.outputs),
                tensors=hash_tensors(stored),
                quantization=None if own is None else own.record,
            )
        entries.append(entry)
    return entries


def _free(graphs: Iterable[onnx_ir.Model], model: PreTrainedModel) -> None:
    """Free the weights, before the model is loaded again to be compared with.

    Caches of torch's and of onnxscript's keep graph and model as long as the process lives.
    """
    for graph in graphs:
        for value in graph.graph.initializers.values():
            value.const_value = None
    drop_weights(model)
    gc.collect()
    return_freed_memory()


@dataclass(frozen=True)
class ProvenGraphs:
    """Graphs that are written only if they compute what the model does.

    Attributes:
        samples: what rounding is measured on and, with `proof`, what the graphs are proved on.
        dense: another model, that a graph is compared with, too.
        provider: that the proof runs on; None: by the settings.
        trust: run code that the checkpoint brings.
    """

    settings: GraphSettings
    proof: bool
    samples: ProofSamples | None
    dense: Dense | None
    provider: Provider | None
    trust: bool

    @classmethod
    def of(
        cls,
        settings: GraphSettings,
        source: Checkpoint,
        given: ProofOptions,
        *,
        proof: bool,
        dense: Dense | None,
        provider: Provider | None = None,
        trust: bool = False,
        split: ImageSplit = "eval",
        windows: int = FEW_WINDOWS,
    ) -> "ProvenGraphs":
        """Return graphs of a checkpoint, or of one that is still to be made of it and reads the same.

        Args:
            given: text or images to prove them on.
            split: of a labels.csv, of which images are taken.
            windows: of text, by default, if nothing is rounded.

        Raises:
            UserError: the model has no such head, or cannot be rounded so.
        """
        task = choose_task(source.config, folder=source.path, task=settings.task, cache=settings.cache)
        check_padding(source.config, task)
        used = provider or default_provider(settings.optimize)
        check_rounding(settings, task, images=bool(given.images), provider=used)
        samples, rounded = None, settings.is_rounded
        if proof or rounded:
            windows = WINDOWS if rounded else windows
            samples = choose_proof_samples(
                source.path,
                task,
                given,
                trust=trust,
                split=split,
                rounded=rounded,
                windows=windows,
                checkpoint=source,
            )
        return cls(settings, proof, samples, dense, provider, trust)

    def write(self, writer: GraphWriter) -> Exported:
        """Write the graphs, or nothing."""
        settings, samples = self.settings, self.samples
        validations: list[Validations] = []

        def prove(folder: Path) -> bool:
            assert samples is not None
            validation = validate(
                folder,
                writer.source.path,
                samples,
                provider=self.provider,
                tolerance=settings.tolerance,
                max_loss=settings.max_loss,
                dense=self.dense,
                trust=self.trust,
            )
            validation.write(folder)
            writer.write_card(folder, read_manifest(folder), validation.graphs)
            validations.append(validation)
            return validation.passed

        manifest = writer.write(prove=prove if self.proof else None, samples=samples, trust=self.trust)
        if manifest is not None and (left_out := name_left_out(writer.source, writer.out)) is not None:
            Notices()(left_out)
        graphs = [] if manifest is None else manifest.graphs
        size: dict[GraphType, int] = {}
        for graph in graphs:
            size[graph.dtype] = size.get(graph.dtype, 0) + count_graph_bytes(writer.out, graph.file)
        return Exported(writer.out, manifest, validations[0] if validations else None, size)
