"""Writes ckpt_prune/model/FAMILIES.md, the page of supported families, from their descriptions."""

import json
from collections.abc import Iterable
from pathlib import Path

from ckpt_prune.model import descriptions
from ckpt_prune.model.composites import known_composites, load_composite
from ckpt_prune.model.descriptions import families_with_experts, known_families, load_family, variants_of
from ckpt_prune.model.family import Family

ROOM = Path(descriptions.__file__).parent
PAGE = ROOM / "FAMILIES.md"
_HEAD = """# Families that can be pruned

Written by `python tools/families.py` from the descriptions in `families/`, `composites/` and `unsupported.json`; do not
edit. A family has the name of the `model_type` in its config.json. [README](README.md#adding-a-family) says how to add
one, or how to prune one that has no description.

*Spaces* are what recipes can prune: `heads` (attention heads or KV groups), `queries` (query heads inside KV groups),
`qk`, `rotary` and `values` (dimensions inside heads), `mlp` (columns), `experts`, `shared` and `dense` (whole experts,
columns of shared ones, and of MLPs in their place). *Stays whole* are spaces that are measured and masked, and lose no
unit. *Rotates* says whether recipes may rotate the residual stream. *Also stored as* are stock types that an output may
have if the family's own cannot state its shape.
"""
_TABLE = "| family | classes | spaces | stays whole | rotates | also stored as |\n|---|---|---|---|---|---|\n"


def _kind(family: Family) -> str:
    if family.modality != "text":
        return "Vision transformers"
    if family.model_type in families_with_experts():
        return "Mixtures of experts"
    return "Causal language models" if family.has_causal else "Encoders of text"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _row(family: Family) -> str:
    variants = variants_of(family.model_type)
    name = f"`{family.model_type}`" + (f" (also with {_codes(variants)})" if variants else "")
    whole_spaces = [space for space, entry in family.spaces.items() if entry.whole is not None]
    cells = [
        name,
        _codes(family.architectures),
        _codes(space for space in family.spaces if space not in whole_spaces),
        _codes(whole_spaces),
        "yes" if family.residual is not None else "no",
        _codes(family.stand_ins),
    ]
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Return the text of the page."""
    rows: dict[str, str] = {}
    for family in map(load_family, known_families()):
        kind = _kind(family)
        rows[kind] = rows.get(kind, "") + _row(family)
    text = _HEAD
    for kind in ("Causal language models", "Mixtures of experts", "Encoders of text", "Vision transformers"):
        text += f"\n## {kind}\n\n{_TABLE}{rows[kind]}"
    text += "\n## Parts of composites\n\n`--part PART` prunes one model inside another.\n\n"
    text += "| composite | parts | cannot be pruned |\n|---|---|---|\n"
    for composite in map(load_composite, known_composites()):
        refused = "; ".join(f"`{part}`: {why}" for part, why in composite.refused.items()) or "-"
        text += f"| `{composite.model_type}` | {_codes(composite.parts)} | {refused} |\n"
    text += "\n## Not supported\n\n| family | why |\n|---|---|\n"
    for model_type, why in json.loads((ROOM / "unsupported.json").read_text(encoding="utf-8")).items():
        text += f"| `{model_type}` | {why} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
