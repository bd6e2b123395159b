"""`genai_config.json`: what onnxruntime-genai has to know to generate with a graph of this folder."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.manifest import GraphEntry
from ckpt_prune.onnx.tasks import PAST, PRESENT, Task

PREFERRED: tuple[GraphType, ...] = ("int4", "int8", "fp32", "q4f16", "fp16")
"""It names one graph: the first of these that there is, the smallest that a CPU computes without casts."""
_INPUTS = ("input_ids", "attention_mask", "position_ids")


def genai_config(graphs: Sequence[GraphEntry], task: Task, config: Any, generation: Any) -> dict[str, Any] | str:
    """The file's contents, or why it cannot be written.

    Args:
        graphs: of the folder.
        task: of them.
        config: transformers' config object of the text model.
        generation: transformers' generation config, or None.
    """
    if task.name != "text-generation" or not task.cached:
        return "onnxruntime-genai runs graphs that generate text with a cache"
    graph = min(graphs, key=lambda each: PREFERRED.index(each.dtype))
    past = [port for port in graph.inputs if port.name.startswith(PAST)]
    sizes = {(port.shape[1], port.shape[3]) for port in past}
    if len(sizes) != 1:
        return "onnxruntime-genai knows one number of heads and one width for keys and values of all layers"
    strange = [port.name for port in graph.inputs if port not in past and port.name not in _INPUTS]
    if strange:
        return f"onnxruntime-genai has nothing to feed the input {strange[0]} with"
    context = context_length(config)
    if context is None:
        return "config.json does not say how long a text may be"
    ((heads, width),) = sizes
    end = getattr(generation, "eos_token_id", None)
    end = getattr(config, "eos_token_id", None) if end is None else end
    if end is None:
        return "config.json names no token that ends a text"
    first = end[0] if isinstance(end, list) else end
    pad, begin = getattr(config, "pad_token_id", None), getattr(config, "bos_token_id", None)
    vocabulary = next(port.shape[-1] for port in graph.outputs if port.name == "logits")
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
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "head_size": width,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.num_attention_heads,
                "num_hidden_layers": len(past) // 2,
                "num_key_value_heads": heads,
                "inputs": {name: name for name in _INPUTS if name in {port.name for port in graph.inputs}}
                | {f"past_{kind}_names": f"{PAST}%d.{kind}" for kind in ("key", "value")},
                "outputs": {"logits": "logits"}
                | {f"present_{kind}_names": f"{PRESENT}%d.{kind}" for kind in ("key", "value")},
            },
        },
        # The graph takes keys and values of any length and returns longer ones: there is no buffer of a fixed size.
        "search": {"do_sample": False, "max_length": context, "past_present_share_buffer": False},
    }
