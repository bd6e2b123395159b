"""Names and shapes of a model's tensors by the description of its family alone, without transformers' class."""

from typing import Any

import torch

_USUAL: dict[str, frozenset[str]] = {
    "act": frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2"}),
    "rope_type": frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}),
}
"""Values of settings that config classes take as they come, and models look up when they are built."""


def is_as_described(model: Any) -> bool:
    """Return whether a checkpoint has just the tensors that its family's description names, in their shapes.

    Then transformers' class would refuse none of them. Where this is False, the class is asked: descriptions leave
    some modules out, and the class says best what is wrong with a folder. So it is where a setting is unusual.
    """
    expected, stored = described_shapes(model), model.tensors
    types = {dtype for dtype, _ in stored.values()}
    is_readable = types <= {torch.bfloat16, torch.float16, torch.float32}
    is_alike = {name: shape for name, (_, shape) in stored.items()} == expected
    return is_readable and is_alike and _is_usual(model.config)


def _is_usual(config: Any) -> bool:
    """Return whether a model would be built with these activations, rotary embeddings and this padding token."""
    names = ("hidden_act", "hidden_activation", "activation", "activation_function")
    activations = {str(getattr(config, name)) for name in names if getattr(config, name, None) is not None}
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    ropes = {str(each.get("rope_type", "default")) for each in kinds}
    padding = getattr(config, "pad_token_id", None)
    is_token = padding is None or -config.vocab_size <= padding < config.vocab_size
    return is_token and activations <= _USUAL["act"] and ropes <= _USUAL["rope_type"]


def described_shapes(model: Any) -> dict[str, tuple[int, ...]] | None:
    """Return name → shape of every tensor, each weight as (outputs, inputs); None if the description lacks some."""
    family, residual, hidden = model.family, model.family.residual, model.dimension("hidden")
    vocabulary = getattr(model.config, "vocab_size", None)
    of_blocks = {frozenset(widths) for widths in model.dense_widths}
    if residual is None or family.embedding is None or vocabulary is None or of_blocks != {frozenset(family.spaces)}:
        return None
    lines: dict[tuple[str, str], int] = {}
    for space in family.consumers.values():
        units = torch.arange(space.site_units(model.dimension))
        for axis, incidence in space.incidences:
            end = int(incidence.lines(units, len(units), model.dimension).max()) + 1
            lines[axis, incidence.module] = max(end, lines.get((axis, incidence.module), 0))
    inside: dict[str, tuple[int, ...]] = {}
    for module in family.linears:
        rows, columns = (lines.get((axis, module), hidden) for axis in ("rows", "columns"))
        inside[f"{module}.weight"] = (rows, columns)
        slot = family.bias_slots.get(module, False)
        if getattr(model.config, slot, False) if isinstance(slot, str) else slot:
            inside[f"{module}.bias"] = (rows,)
    kinds = ("weight", "bias") if residual.norm == "layer" else ("weight",)
    norms = [*residual.reads, *(space.norm for space in family.consumers.values() if space.norm is not None)]
    inside |= {f"{norm}.{kind}": (hidden,) for norm in norms for kind in kinds}
    prefixes = [family.block.format(block=block) for block in range(model.blocks)]
    shapes = {f"{prefix}{name}": shape for prefix in prefixes for name, shape in inside.items()}
    shapes |= {f"{family.on_disk(residual.final)}.{kind}": (hidden,) for kind in kinds}
    shapes[f"{family.on_disk(family.embedding)}.weight"] = (int(vocabulary), hidden)
    if family.head is not None and not model.tied:
        shapes[f"{family.head}.weight"] = (int(vocabulary), hidden)
    return shapes
