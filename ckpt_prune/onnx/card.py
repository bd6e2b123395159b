"""The model card of an exported graph, with a snippet that needs onnxruntime and numpy alone."""

import itertools
from types import SimpleNamespace
from typing import Any

from ckpt_prune.common.filenames import GENAI, GRAPH_RECORD, VALIDATION
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.manifest import GraphEntry, Manifest, Port
from ckpt_prune.onnx.tasks import PAST, PRESENT


def graph_card(
    manifest: Manifest, config: dict[str, Any], *, proved: bool = True, genai: dict[str, Any] | str = ""
) -> str:
    """README.md of an exported folder.

    Args:
        manifest: its record.
        config: config.json.
        proved: whether there is a validation.json.
        genai: what is in genai_config.json, or why there is none.
    """
    compared = (
        f"What came out when it was compared with PyTorch is in `{VALIDATION}`"
        if proved
        else "It was not compared with PyTorch; `ckpt-prune validate` does it"
    )
    fused = "" if manifest.optimize == "none" else f", fused for onnxruntime's {manifest.optimize.upper()} provider"
    lines = [
        "---",
        "library_name: onnx",
        f"pipeline_tag: {manifest.task}",
        "tags: [ckpt-prune, onnx]",
        "---",
        "",
        f"# {as_markdown(manifest.source.name)}, ONNX",
        "",
        "```python",
        snippet(manifest),
        "```",
        "",
        f"Exported by ckpt_prune {manifest.versions['ckpt_prune']} from {as_code(manifest.source.name)} "
        f"({as_markdown(str(config.get('model_type')))}): {manifest.task}{fused}.",
        f"{compared}. What it was made from is in `{GRAPH_RECORD}`.",
        *_context(manifest, config),
        *_genai(manifest, genai),
        "",
        "| file | type | opset | weights |",
        "|---|---|---|---|",
        *(f"| `{each.file}` | {each.dtype} | {each.opset} | {_stored(each)} |" for each in manifest.graphs),
        "",
        "| | name | type | shape |",
        "|---|---|---|---|",
    ]
    for what, ports in (("in", manifest.inputs), ("out", manifest.outputs)):
        lines += [f"| {what} | {name} | {kind} | {shape} |" for name, kind, shape in _ranges(ports)]
    if {each.float_type for each in manifest.each} == {"float32", "float16"}:
        lines += ["", "float32 is float16 in graphs of fp16 and q4f16."]
    return "\n".join([*lines, ""])


def _genai(manifest: Manifest, genai: dict[str, Any] | str) -> list[str]:
    """Which graph onnxruntime-genai takes, or why it takes none."""
    if isinstance(genai, dict):
        return [f"onnxruntime-genai generates with `{genai['model']['decoder']['filename']}` (`{GENAI}`)."]
    return [f"There is no `{GENAI}`: {genai}."] if genai and manifest.cached else []


def _stored(graph: GraphEntry) -> str:
    """How a graph's weights are stored."""
    if graph.quantised is None:
        return "as they are" if graph.dtype == "fp32" else "float16"
    return ", ".join(f"{count} in {kind}" for kind, count in graph.quantised.weights.items())


def _ranges(ports: list[Port]) -> list[tuple[str, str, str]]:
    """Name, type and shape; keys and values of layers that follow each other and are alike in one row."""
    rows: list[tuple[str, str, str]] = []
    for alike, run in itertools.groupby(ports, key=lambda port: (_layer(port.name)[0], port.type, port.shape)):
        names = [port.name for port in run]
        first, last = _layer(names[0])[1], _layer(names[-1])[1]
        name = f"`{names[0]}`"
        if first is not None and last is not None and len(names) > 1:
            ends = sorted({each.rpartition(".")[2] for each in names})
            which = str(first) if first == last else f"{first}…{last}"
            name = f"`{alike[0]}{which}.{'` and `.'.join(ends)}`"
        rows.append((name, alike[1], " × ".join(map(str, alike[2]))))
    return rows


def _layer(name: str) -> tuple[str, int | None]:
    """What a name of keys or values begins with, and of which layer they are; another name as it is."""
    prefix = next((prefix for prefix in (PAST, PRESENT) if name.startswith(prefix)), None)
    return (name, None) if prefix is None else (prefix, int(name.removeprefix(prefix).split(".")[0]))


def _context(manifest: Manifest, config: dict[str, Any]) -> list[str]:
    """How long a text may be; beyond, a graph fails over an index or reads positions it was never trained on."""
    limit = context_length(SimpleNamespace(**config))
    if manifest.modality == "image" or limit is None:
        return []
    return [f"Texts have at most {limit} tokens, a prompt and what is generated after it together."]


def snippet(manifest: Manifest) -> str:
    """Python that runs the graph in the current folder, on made-up tokens or pixels."""
    on = ', providers=["CUDAExecutionProvider", "CPUExecutionProvider"]' if manifest.optimize == "cuda" else ""
    lines = [
        "import numpy as np",
        "import onnxruntime",
        "",
        f'session = onnxruntime.InferenceSession("{manifest.file}"{on})',
    ]
    names = [port.name for port in manifest.inputs]
    kind = manifest.float_type
    if manifest.cached:
        lines += _generation(names, kind, _hint(manifest))
    elif manifest.modality == "image":
        sizes = ", ".join(str(size) for size in manifest.inputs[0].shape[1:])
        shown = "first.argmax(-1)" if manifest.task == "image-classification" else "first.shape"
        lines += [
            f"pixels = np.zeros((1, {sizes}), np.{kind})  # resized and normalised as preprocessor_config.json says",
            'first, *others = session.run(None, {"pixel_values": pixels})',
            f"print({shown})",
        ]
    else:
        generates = manifest.task == "text-generation"
        lines += [
            f"ids = np.array([[3, 4, 5]]){_hint(manifest)}",
            f"first, *others = session.run(None, {{{_feed(names, 'ids', 'ids.shape[1]')}}})",
            "print(first[:, -1].argmax(-1))  # the next token" if generates else "print(first.shape)",
        ]
    return "\n".join(lines)


def _hint(manifest: Manifest) -> str:
    """Where token ids come from, as a comment."""
    if "tokenizer.json" not in manifest.files:
        return "  # token ids of a text"
    return '  # of a text: tokenizers.Tokenizer.from_file("tokenizer.json").encode(TEXT).ids'


def _feed(names: list[str], ids: str, total: str) -> str:
    """The graph's inputs of tokens without padding, as the inside of a dict."""
    known = {
        "input_ids": ids,
        "attention_mask": f"np.ones((1, {total}), np.int64)",
        "position_ids": f"np.arange({total})[None, -{ids}.shape[1]:]",
        "token_type_ids": f"np.zeros_like({ids})",
    }
    return ", ".join(f'"{name}": {value}' for name, value in known.items() if name in names)


def _generation(names: list[str], kind: str, hint: str) -> list[str]:
    shown = "  # as text: the tokenizer's decode(ids[0])" if "tokenizer.json" in hint else ""
    return [
        f"ids = new = np.array([[3, 4, 5]]){hint}",
        'past = [each for each in session.get_inputs() if each.name.startswith("past_key_values.")]',
        f"cache = {{p.name: np.zeros((1, p.shape[1], 0, p.shape[3]), np.{kind}) for p in past}}",
        "for _ in range(20):",
        f"    feed = {{{_feed(names, 'new', 'ids.shape[1]')}}}",
        "    logits, *present = session.run(None, feed | cache)",
        "    new, cache = logits[:, -1:].argmax(-1), dict(zip(cache, present))",
        "    ids = np.hstack([ids, new])",
        f"print(ids){shown}",
    ]
