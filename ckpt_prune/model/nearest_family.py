"""Which known family an unknown one is shaped like, what differs, and the description to start from."""

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import (
    FUNCTION_KEYS,
    description_keys,
    family_for_config,
    known_families,
    load_family,
)
from ckpt_prune.model.family import Family
from ckpt_prune.model.skeleton import (
    Names,
    build_skeleton,
    is_stored_buffer,
    parse_config,
    quiet_transformers,
)

_INDEX = re.compile(r"(.+?\.)\d+(\..+)")
_BLOCK = "{block}"
_CLOSE = 5
"""Families whose names are the nearest, of which the code is compared too."""
_LEAST = 0.5
"""Share of the names of tensors that two models have in common, if they are alike at all."""
_DEPENDS = {
    "transposed": ("Attention", "MLP"),
    "rope": ("Attention", "RotaryEmbedding", "apply_rotary_pos_emb"),
    "sliding_window": ("Attention", "DecoderLayer", "Model"),
    "norm_offset": ("RMSNorm", "LayerNorm"),
    "residual": ("RMSNorm", "LayerNorm", "DecoderLayer", "Model"),
    "unrotatable": ("RMSNorm", "LayerNorm", "DecoderLayer", "Model"),
    "refused": ("Attention", "DecoderLayer", "Model"),
    "variants": ("Attention", "DecoderLayer", "Model"),
}
"""Key of a description → ends of the names of the classes that it is a fact of."""


@dataclass(frozen=True)
class FamilyComparison:
    """What an unknown family is like.

    Attributes:
        model_type: of config.json.
        architecture: the stock class that would load it.
        family: the known family that is nearest.
        lacking: tensors of that family's blocks (or outside them) that this one has not, with `{block}`.
        extra: those that only this one has.
        keys: config keys that only this one's class has → their values.
        code: classes of transformers that the two do not have alike, by the ends of their names.
        undecided: keys of the description that depend on these and that `draft` leaves open.
        draft: a description to start from.
    """

    model_type: str
    architecture: str
    family: str
    lacking: tuple[str, ...]
    extra: tuple[str, ...]
    keys: dict[str, Any]
    code: tuple[str, ...]
    undecided: tuple[str, ...]
    draft: dict[str, Any]


@quiet_transformers()
def compare_with_families(config: dict[str, Any]) -> FamilyComparison:
    """Compare a model of an unknown family with the known ones.

    Args:
        config: its config.json.

    Raises:
        UserError: transformers has no class for it either, or refuses the config, or it is like no known family.
    """
    parsed = parse_config(config)
    architecture = _architecture(config, parsed)
    names = Names(build_skeleton(parsed, architecture))
    own = _generic(names.shapes)
    near = sorted(_shapes_of_families().items(), key=lambda item: -_shared(own, item[1]))[:_CLOSE]
    mine = _code(architecture)

    def nearness(model_type: str) -> tuple[float, int, int]:
        theirs = _code(load_family(model_type).architecture)
        alike = sum(mine[name] == theirs.get(name) for name in mine)
        return _shared(own, dict(near)[model_type]), alike, -len(_only(parsed, model_type))

    best = max((model_type for model_type, _ in near), key=nearness)
    known = dict(near)[best]
    if _shared(own, known) < _LEAST:
        raise UserError(
            f"model_type {parsed.model_type!r} is like none of the families that this version knows: {best} is "
            f"nearest, and of {len(own)} kinds of tensors {len(own & known)} have the names of one of its {len(known)}"
        )
    family, theirs = load_family(best), _code(load_family(best).architecture)
    code = tuple(sorted(name for name in mine if mine[name] != theirs.get(name)))
    draft, undecided = _draft(family, parsed, config, architecture, names, code)
    return FamilyComparison(
        model_type=parsed.model_type,
        architecture=architecture,
        family=best,
        lacking=tuple(sorted(known - own)),
        extra=tuple(sorted(own - known)),
        keys=_only(parsed, best),
        code=code,
        undecided=undecided,
        draft=draft,
    )


def _architecture(config: Mapping[str, Any], parsed: PreTrainedConfig) -> str:
    for name in config.get("architectures") or []:
        if isinstance(getattr(transformers, name, None), type):
            return str(name)
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        found = getattr(transformers, auto)._model_mapping.get(type(parsed), None)
        if found is not None:
            return str((found[0] if isinstance(found, tuple) else found).__name__)
    raise UserError(f"transformers has no model for config.json of type {parsed.model_type}")


# ---- names of tensors --------------------------------------------------------------------------------------------


def _generic(names: Iterable[str]) -> frozenset[str]:
    """Names of tensors with `{block}` for the index of a block."""
    found = set()
    for name in names:
        if not is_stored_buffer(name):
            match = _INDEX.fullmatch(name)
            found.add(f"{match[1]}{_BLOCK}{match[2]}" if match else name)
    return frozenset(found)


def _shared(own: Collection[str], other: Collection[str]) -> float:
    return len(set(own) & set(other)) / len(set(own) | set(other))


@cache
def _shapes_of_families() -> dict[str, frozenset[str]]:
    """Known family → names of its tensors, at the sizes that its config class has by default and with one block."""
    found = {}
    for model_type in known_families():
        family = load_family(model_type)
        config = AutoConfig.for_model(model_type)
        setattr(config, family.dimensions["layers"][0], 1)
        for dimension, keys in family.dimensions.items():
            if keys and getattr(config, keys[0], 0) is None:
                setattr(config, keys[0], family.dimension(config, dimension))
        found[model_type] = _generic(Names(build_skeleton(config, family.architecture)).shapes)
    return found


def _only(parsed: PreTrainedConfig, model_type: str) -> dict[str, Any]:
    """Config keys that the class of a known family has not, with the values of this model."""
    other = AutoConfig.for_model(model_type).to_dict()
    return {key: value for key, value in sorted(parsed.to_dict().items()) if key not in other and key != "dtype"}


# ---- transformers' code ------------------------------------------------------------------------------------------


@cache
def _code(architecture: str) -> dict[str, str]:
    """Classes and functions beside a stock class, without comments and documentation → their code.

    The family's own name in theirs is taken out, as the files of one family are copies of another's.
    """
    module = getattr(transformers, architecture).__module__
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    classes = [node.name for node in definitions if isinstance(node, ast.ClassDef)]
    prefix = _common_prefix(classes, architecture)
    found = {}
    for node in definitions:
        for each in ast.walk(node):
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                first = each.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    each.body = each.body[1:] or [ast.Pass()]
                each.decorator_list = []
        text = ast.unparse(node)
        found[node.name.removeprefix(prefix)] = re.sub(rf"\b{re.escape(prefix)}(?=\w)", "", text)
    return found


def _common_prefix(classes: Sequence[str], architecture: str) -> str:
    """What the names of a file's classes begin with: the family's name."""
    words = re.findall(r"[A-Z][a-z0-9_]*|[A-Z]+(?![a-z])", architecture)
    counts = Counter("".join(words[: length + 1]) for length in range(len(words)) for _ in classes)
    for prefix in sorted(counts, key=len, reverse=True):
        if 2 * sum(name.startswith(prefix) for name in classes) > len(classes):
            return prefix
    return ""


# ---- the description to start from -------------------------------------------------------------------------------


def _draft(
    family: Family,
    parsed: PreTrainedConfig,
    config: Mapping[str, Any],
    architecture: str,
    names: Names,
    code: Collection[str],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A description that extends the nearest family, and the keys that it leaves open."""
    whole = family_for_config(
        {"model_type": family.model_type, **{k: v for k, v in config.items() if k != "model_type"}}
    )
    prefix, modules = _block(names)
    head = next((f"{each}" for each in ("lm_head", whole.head) if each and f"{each}.weight" in names.shapes), None)
    auto = whole.auto_class
    if architecture.endswith("ForCausalLM"):
        auto = "AutoModelForCausalLM"
    own: dict[str, Any] = {"auto": auto} | ({"head": head} if head else {})
    draft: dict[str, Any] = {
        "extends": family.model_type,
        "inherits": [],
        "model_type": parsed.model_type,
        "architectures": {architecture: own},
    }
    if prefix is not None and prefix != whole.block:
        draft["block"] = prefix
    draft |= _spaces(whole, modules)
    draft["bias_slots"] = _slots(whole, parsed, config, architecture, modules)
    draft["stand_ins"] = []
    divide = _divides(whole, parsed, config)
    if divide != whole.heads_divide_hidden:
        draft["heads_divide_hidden"] = divide
    if whole.residual is not None and not _differs(code, _DEPENDS["residual"]):
        reads = {norm: [m for m in fed if m in modules] for norm, fed in whole.residual.reads.items()}
        writes = [module for module in whole.residual.writes if module in modules]
        if reads != whole.residual.reads or writes != whole.residual.writes:
            draft["residual"] = whole.residual.model_dump(exclude_defaults=True) | {"reads": reads, "writes": writes}
    undecided = []
    stated = description_keys(family.model_type)
    for key in FUNCTION_KEYS:
        if key in draft or key not in stated:
            continue
        if _differs(code, _DEPENDS.get(key, ("Attention", "MLP", "DecoderLayer"))):
            undecided.append(key)
        else:
            draft["inherits"].append(key)
    return draft, tuple(undecided)


def _differs(code: Collection[str], ends: Iterable[str]) -> bool:
    return any(name.endswith(tuple(ends)) for name in code)


def _block(names: Names) -> tuple[str | None, frozenset[str]]:
    """Prefix of a block's tensors, with `{block}`, and the linear modules in a block."""
    matches = [match for match in map(_INDEX.fullmatch, names.shapes) if match]
    if not matches:
        return None, frozenset()
    lists = Counter(match[1] for match in matches)
    ((first, _),) = lists.most_common(1)
    prefix = f"{first}{_BLOCK}."
    inside = {n.removeprefix(f"{first}0.") for n in names.shapes if n.startswith(f"{first}0.")}
    weights = {n.removesuffix(".weight") for n in inside if len(names.shapes[f"{first}0.{n}"]) == 2}
    return prefix, frozenset(weights)


def _spaces(family: Family, modules: frozenset[str]) -> dict[str, Any]:
    """The spaces without modules that are not there, where any is not."""
    found: dict[str, Any] = {}
    for name, space in family.spaces.items():
        values = space.model_dump(exclude_defaults=True)
        values["rows"] = [row for row in values["rows"] if row["module"] in modules]
        found[name] = values
    trimmed = any(len(found[name]["rows"]) != len(space.rows) for name, space in family.spaces.items())
    return {"spaces": found} if trimmed else {}


def _divides(family: Family, parsed: PreTrainedConfig, config: Mapping[str, Any]) -> bool:
    """Whether the config class refuses a number of heads that does not divide the hidden size."""
    hidden = family.dimension(parsed, "hidden")
    odd = next(count for count in range(3, hidden + 2) if hidden % count)
    keys = [family.dimensions[name][0] for name in ("query_heads", "kv_heads") if family.dimensions[name]]
    try:
        parse_config(dict(config) | dict.fromkeys(keys, odd))
    except UserError:
        return True
    return False


def _slots(
    family: Family, parsed: PreTrainedConfig, config: Mapping[str, Any], architecture: str, modules: frozenset[str]
) -> dict[str, str | bool]:
    """Linear module → the config key that gives it a bias, or true: found by turning keys on and off."""
    keys = [key for key, value in parsed.to_dict().items() if "bias" in key and isinstance(value, bool)]
    block = family.block.format(block=0)

    def biased(opened: Collection[str]) -> set[str]:
        values = dict(config) | {key: key in opened for key in keys}
        names = Names(build_skeleton(parse_config(values), architecture)).shapes
        return {m for m in modules if f"{block}{m}.bias" in names}

    always = biased(())
    slots: dict[str, str | bool] = {module: True for module in family.linears if module in always}
    for key in keys:
        slots |= {module: key for module in family.linears if module in biased([key]) - always}
    return slots
