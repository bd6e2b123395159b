"""The model card of an exported graph, with code that needs onnxruntime and numpy alone, and `genai_config.json`."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.sentence_modules import MODULES, WEIGHTS, find_sentence_use, read_modules, read_pooling
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GENAI, GRAPH_RECORD, VALIDATION
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.evaluation.quality import lines_of
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.records import GraphEntry, Manifest, Port, Validation
from ckpt_prune.onnx.stacks import BRANCH
from ckpt_prune.onnx.tasks import PAST, PRESENT, GraphTask
from ckpt_prune.show.model_card import lines_of_search

PREFERRED: tuple[GraphType, ...] = ("int4", "int8", "fp32", "q4f16", "fp16")
"""genai_config.json names the first of these that there is, the smallest that a CPU computes without casts."""
_GENAI_INPUTS = ("input_ids", "attention_mask", "position_ids")
_SESSION_OPTIONS = {"log_id": "onnxruntime-genai", "provider_options": []}
_MODEL_KEYS = {"type", "context_length", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "decoder"}
_DECODER_KEYS = {
    *("filename", "session_options", "head_size", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "inputs", "outputs"),
}


def make_card(
    manifest: Manifest,
    config: dict[str, Any],
    *,
    folder: Path,
    name: str | None = None,
    proved: bool = True,
    genai: dict[str, Any] | str = "",
    validations: Sequence[Validation] = (),
) -> str:
    """README.md of an exported folder.

    Args:
        folder: with the modules of an embedder, and the record of the search that found the graph.
        name: for the title; None: that of the checkpoint.
        validations: of the graphs of each type, for what they lose beside their model, and beside a dense one.
        proved: whether there is a validation.json.
        genai: what is in genai_config.json, or why there is none.
    """
    found = lines_of_search(folder)
    compared = "It was not compared with PyTorch; `ckpt-prune validate` does it"
    if proved:
        compared = f"What came out when it was compared with PyTorch is in `{VALIDATION}`"
    elif found:
        compared = "`ckpt-prune validate` compares all that it returns with PyTorch"
    fused = "" if manifest.optimize == "none" else f", fused for onnxruntime's {manifest.optimize.upper()} provider"
    lines = [
        "---",
        "library_name: onnx",
        f"pipeline_tag: {manifest.task}",
        "tags: [ckpt-prune, onnx]",
        "---",
        "",
        f"# {as_markdown(name or manifest.source.name)}, ONNX",
        "",
        "```python",
        make_snippet(manifest, folder),
        "```",
        "",
        f"Exported by ckpt_prune {manifest.versions['ckpt_prune']} from {as_code(manifest.source.name)} "
        f"({as_markdown(str(config.get('model_type')))}): {manifest.task}{fused}.",
        f"{compared}. What it was made from is in `{GRAPH_RECORD}`.",
        *found,
    ]
    for each in validations:
        measured = [line for loss in each.losses() for line in lines_of(loss)]
        of = f"{each.dtype}: " if len(validations) > 1 else ""
        lines += [as_markdown(f"{of}{line}." if of else f"{line[0].upper()}{line[1:]}.") for line in measured]
    if find_sentence_use(folder) == "sentence-similarity":
        lines.append(f"`embedding` is what `{MODULES}` makes of one text. Of texts in a batch, padding does not count.")
    limit = None if manifest.modality == "image" else context_length(SimpleNamespace(**config))
    if limit is not None:  # beyond, a graph fails over an index or reads positions it was never trained on
        lines.append(f"Texts have at most {limit} tokens, a prompt and what is generated after it together.")
    if isinstance(genai, dict):
        lines.append(f"onnxruntime-genai generates with `{genai['model']['decoder']['filename']}` (`{GENAI}`).")
    elif genai and manifest.cached:
        lines.append(f"There is no `{GENAI}`: {genai}.")
    if manifest.modality == "pairs":
        lines.append(
            "The decoder reads a target from its start where the cache is empty, and goes on with it where that is "
            f"what it returned. `{BRANCH}` changes nothing; optimum and transformers.js know such graphs by it."
        )
    lines += [
        "",
        "| file | type | opset | weights |",
        "|---|---|---|---|",
        *(
            f"| `{graph.file}` | {graph.dtype} | {graph.opset} | {_describe_weights(graph)} |"
            for graph in manifest.graphs
        ),
    ]
    for graph in manifest.split_by_type()[0].graphs:
        lines += ["", f"| {graph.stack or ''} | name | type | shape |", "|---|---|---|---|"]
        for what, ports in (("in", graph.inputs), ("out", graph.outputs)):
            lines += [f"| {what} | {name} | {kind} | {shape} |" for name, kind, shape in _group_ports(ports)]
    if {graph.float_type for graph in manifest.split()} == {"float32", "float16"}:
        lines += ["", "float32 is float16 in graphs of fp16 and q4f16."]
    return "\n".join([*lines, ""])


def _describe_weights(graph: GraphEntry) -> str:
    if graph.quantization is None:
        return "as they are" if graph.dtype == "fp32" else "float16"
    return ", ".join(f"{count} in {kind}" for kind, count in graph.quantization.kinds.items())


def _group_ports(ports: list[Port]) -> list[tuple[str, str, str]]:
    """Name, type and shape; keys and values of layers that follow each other and are alike in one row.

    Those that a decoder has of its encoder are in rows of their own, behind those of itself.
    """
    kinds = [_split_name(port.name)[::2] for port in ports]
    ordered = sorted(zip(kinds, ports, strict=True), key=lambda each: kinds.index(each[0]))
    rows: list[tuple[str, str, str]] = []
    for alike, run in itertools.groupby(ordered, lambda each: (each[0], each[1].type, each[1].shape)):
        names = [port.name for _, port in run]
        (prefix, first, stack), (_, last, _) = _split_name(names[0]), _split_name(names[-1])
        name = f"`{names[0]}`"
        if first is not None and len(names) > 1:
            ends = sorted({each.rpartition(".")[2] for each in names})
            layers = first if first == last else f"{first}…{last}"
            name = f"`{prefix}{layers}{stack}.{'` and `.'.join(ends)}`"
        rows.append((name, alike[1], " × ".join(map(str, alike[2]))))
    return rows


def _split_name(name: str) -> tuple[str, str | None, str]:
    """Return prefix, layer and stack of keys or values: "present.", "0", ".decoder" or ""; another name as it is."""
    prefix = next((prefix for prefix in (PAST, PRESENT) if name.startswith(prefix)), None)
    if prefix is None:
        return name, None, ""
    layer, *stack = name.removeprefix(prefix).split(".")[:-1]
    return prefix, layer, "".join(f".{each}" for each in stack)


_POOLING = {
    "cls": "first[:, 0]",
    "max": "first.max(1)",
    "mean": "first.mean(1)",
    "mean_sqrt_len": "first.sum(1) / first.shape[1] ** 0.5",
    "weightedmean": "np.average(first, 1, np.arange(1, first.shape[1] + 1))",
    "lasttoken": "first[:, -1]",
}
"""Way in which a module Pooling pools → the same in numpy, of one text's states `first`."""
_ACTIVATIONS = {
    "Identity": "{}",
    "Tanh": "np.tanh({})",
    "ReLU": "np.maximum({}, 0)",
    "GELU": "(lambda x: x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2)({})",
    "Sigmoid": "1 / (1 + np.exp(-({})))",
}


def _activation_of(place: Path) -> str:
    return str(read_json_object(place / "config.json").get("activation_function", "Tanh")).rpartition(".")[2]


def _write_modules(folder: Path) -> list[str]:
    """Python that makes an embedding of `first` as a sentence-transformers folder says; none for other folders."""
    if find_sentence_use(folder) != "sentence-similarity":
        return []
    lines = []
    for module in read_modules(folder)[1:]:
        place = folder / (module.folder or "")
        if module.kind == "Pooling":
            parts = [_POOLING[mode] for mode in read_pooling(place) if mode in _POOLING] or [_POOLING["mean"]]
            joined = ", ".join(parts)
            lines.append(f"embedding = {joined if len(parts) == 1 else f'np.hstack([{joined}])'}")
        elif module.kind == "Normalize":
            lines.append("embedding /= np.linalg.norm(embedding, axis=-1, keepdims=True)")
        elif module.kind == "Dense" and (activation := _activation_of(place)) in _ACTIVATIONS:
            names = read_header(place / WEIGHTS).tensors
            bias = ' + dense["linear.bias"]' if "linear.bias" in names else ""
            product = f'embedding @ dense["linear.weight"].T{bias}'
            lines.append(f'dense = safetensors.numpy.load_file("{module.folder}/{WEIGHTS}")')
            lines.append(f"embedding = {_ACTIVATIONS[activation].format(product)}")
        else:
            lines.append(f"# then {module.kind}, as {MODULES} says")
    return lines


def make_snippet(manifest: Manifest, folder: Path) -> str:
    """Python that runs the graph in the current folder, on made-up tokens or pixels.

    `folder` holds the modules of an embedder.
    """
    if manifest.modality == "pairs":
        start = read_json_object(folder / GENERATION_CONFIG_NAME).get("decoder_start_token_id")
        return _write_pair_snippet(manifest, start)
    providers = ', providers=["CUDAExecutionProvider", "CPUExecutionProvider"]' if manifest.optimize == "cuda" else ""
    lines = [
        "import numpy as np",
        "import onnxruntime",
        "",
        f'session = onnxruntime.InferenceSession("{manifest.file}"{providers})',
    ]
    has_tokenizer = "tokenizer.json" in manifest.files
    hint = "  # token ids of a text"
    if has_tokenizer:
        hint = '  # of a text: tokenizers.Tokenizer.from_file("tokenizer.json").encode(TEXT).ids'
    if manifest.cached:
        decoded = "  # as text: the tokenizer's decode(ids[0])" if has_tokenizer else ""
        lines += [
            f"ids = new = np.array([[3, 4, 5]]){hint}",
            'past = [each for each in session.get_inputs() if each.name.startswith("past_key_values.")]',
            f"cache = {{p.name: np.zeros((1, p.shape[1], 0, p.shape[3]), np.{manifest.float_type}) for p in past}}",
            "for _ in range(20):",
            f"    feed = {{{_write_feed(manifest, 'new')}}}",
            "    logits, *present = session.run(None, feed | cache)",
            "    new, cache = logits[:, -1:].argmax(-1), dict(zip(cache, present))",
            "    ids = np.hstack([ids, new])",
            f"print(ids){decoded}",
        ]
    elif manifest.modality == "image":
        sizes = ", ".join(str(size) for size in manifest.inputs[0].shape[1:])
        shown = "first.argmax(-1)" if manifest.task == "image-classification" else "first.shape"
        pixels = f"np.zeros((1, {sizes}), np.{manifest.float_type})"
        lines += [
            f"pixels = {pixels}  # resized and normalised as preprocessor_config.json says",
            'first, *others = session.run(None, {"pixel_values": pixels})',
            f"print({shown})",
        ]
    else:
        generates = manifest.task == "text-generation"
        lines += [
            f"ids = np.array([[3, 4, 5]]){hint}",
            f"first, *others = session.run(None, {{{_write_feed(manifest, 'ids')}}})",
            "print(first[:, -1].argmax(-1))  # the next token" if generates else "print(first.shape)",
        ]
        if modules := _write_modules(folder):
            lines[-1:] = [*modules, "print(embedding.shape)"]
            code = "\n".join(modules)
            lines[0:0] = [] if "math." not in code else ["import math", ""]
            lines[lines.index("import onnxruntime") + 1 : 0] = (
                ["import safetensors.numpy"] if "safetensors" in code else []
            )
    return "\n".join(lines)


def _write_pair_snippet(manifest: Manifest, start: Any) -> str:
    """Do so for the graphs of an encoder and a decoder; `start`: the token that targets begin with."""
    encoder, decoder = manifest.split_by_type()[0].graphs
    hears = all(port.name != "attention_mask" for port in encoder.inputs)
    kind = manifest.float_type
    source = ["ids = np.array([[3, 4, 5]])  # token ids of a source, as its tokenizer writes them"]
    feed = '{"input_ids": ids, "attention_mask": np.ones_like(ids)}'
    mask = ', "encoder_attention_mask": np.ones_like(ids)'
    if hears:
        sizes = ", ".join(str(size) for size in encoder.inputs[0].shape[1:])
        source = [f"sound = np.zeros((1, {sizes}), np.{kind})  # features, as preprocessor_config.json says"]
        feed, mask = '{"input_features": sound}', ""
    load = 'onnxruntime.InferenceSession("{}")'
    return "\n".join(
        [
            "import numpy as np",
            "import onnxruntime",
            "",
            f"encoder = {load.format(encoder.file)}",
            f"decoder = {load.format(decoder.file)}",
            *source,
            f"states = encoder.run(None, {feed})[0]",
            f"new = np.array([[{start}]])  # the token that targets begin with",
            'past = [each for each in decoder.get_inputs() if each.name.startswith("past_key_values.")]',
            f"cache = {{p.name: np.zeros((1, p.shape[1], 0, p.shape[3]), np.{kind}) for p in past}}",
            "target = new",
            "for _ in range(20):",
            f'    feed = {{"input_ids": new, "encoder_hidden_states": states{mask}}}',
            f'    feed["{BRANCH}"] = np.array([target.shape[1] > 1])',
            "    logits, *present = decoder.run(None, feed | cache)",
            "    new, cache = logits[:, -1:].argmax(-1), dict(zip(cache, present))",
            "    target = np.hstack([target, new])",
            "print(target)  # as text: the tokenizer's decode(target[0])",
        ]
    )


def _write_feed(manifest: Manifest, ids: str) -> str:
    """Return the graph's inputs of tokens without padding, as the inside of a dict."""
    feeds = {
        "input_ids": ids,
        "attention_mask": "np.ones((1, ids.shape[1]), np.int64)",
        "position_ids": f"np.arange(ids.shape[1])[None, -{ids}.shape[1]:]",
        "token_type_ids": f"np.zeros_like({ids})",
    }
    names = [port.name for port in manifest.inputs]
    return ", ".join(f'"{name}": {value}' for name, value in feeds.items() if name in names)


def read_genai_graph(path: Path, *, trust: bool) -> str:
    """Return the file of the graph that a genai_config.json names.

    Args:
        trust: it may say more than `make_genai_config` writes: onnxruntime-genai loads libraries that it names.

    Raises:
        UserError: it is damaged, or says more.
    """
    config = read_json_object(path)
    model = config.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    file = decoder.get("filename") if isinstance(decoder, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict) or not isinstance(file, str):
        raise UserError(f"{path} names no graph in model.decoder.filename: export it again")
    others = (config.keys() - {"model", "search"}) | (model.keys() - _MODEL_KEYS) | (decoder.keys() - _DECODER_KEYS)
    more = sorted(others)
    if decoder.get("session_options") != _SESSION_OPTIONS:
        more.append("session_options")
    if more and not trust:
        raise UserError(
            f"{path} says more than this package writes ({more[0][:60]!r}), and onnxruntime-genai may load libraries "
            "by it: export it again, or say --trust-remote-code"
        )
    return file


def make_genai_config(
    graphs: Sequence[GraphEntry], task: GraphTask, config: Any, generation: Any
) -> dict[str, Any] | str:
    """`genai_config.json`, with which onnxruntime-genai generates with a graph, or why it cannot be written.

    Args:
        task: of them.
        config: transformers' config object of the text model.
        generation: transformers' generation config, or None.
    """
    if task.modality == "pairs":
        return "encoder-decoders do not run in genai"
    if task.name != "text-generation" or not task.cached:
        return "onnxruntime-genai runs graphs that generate text with a cache"
    graph = min(graphs, key=lambda each: PREFERRED.index(each.dtype))
    past = [port for port in graph.inputs if port.name.startswith(PAST)]
    keys, values = ([port.shape[3] for port in past if port.name.endswith(kind)] for kind in (".key", ".value"))
    if keys != values:
        return "onnxruntime-genai makes the values of a layer as wide as its keys"
    unknown = [port.name for port in graph.inputs if port not in past and port.name not in _GENAI_INPUTS]
    if unknown:
        return f"onnxruntime-genai has nothing to feed the input {unknown[0]} with"
    context = context_length(config)
    if context is None:
        return "config.json does not say how long a text may be"
    # The runtime makes the cache by the shapes of the graph, layer by layer. These numbers must only be there.
    heads, width = past[0].shape[1], past[0].shape[3]
    end = getattr(generation, "eos_token_id", None)
    end = getattr(config, "eos_token_id", None) if end is None else end
    if end is None:
        return "config.json names no token that ends a text"
    first = end[0] if isinstance(end, list) else end
    pad, begin = getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None)
    vocabulary = next(port.shape[-1] for port in graph.outputs if port.name == "logits")
    names = {port.name for port in graph.inputs}
    return {
        "model": {
            "type": "decoder",
            "context_length": context,
            "vocab_size": vocabulary,
            "bos_token_id": first if begin is None else begin,
            "eos_token_id": end,
            "pad_token_id": first if pad is None else pad,
            "decoder": {
                "filename": graph.file,
                "session_options": _SESSION_OPTIONS,
                "head_size": width,
                "hidden_size": config.hidden_size,
                "num_attention_heads": vars(config).get("num_attention_heads", heads),
                "num_hidden_layers": len(past) // 2,
                "num_key_value_heads": heads,
                "inputs": {name: name for name in _GENAI_INPUTS if name in names}
                | {f"past_{kind}_names": f"{PAST}%d.{kind}" for kind in ("key", "value")},
                "outputs": {"logits": "logits"}
                | {f"present_{kind}_names": f"{PRESENT}%d.{kind}" for kind in ("key", "value")},
            },
        },
        # The graph takes keys and values of any length and returns longer ones: there is no buffer of a fixed size.
        "search": {"do_sample": False, "max_length": context, "past_present_share_buffer": False},
    }
