"""Compares a model of an unknown family with the known ones, and drafts a description of it."""

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
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ckpt_prune.common.documents import find_document
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.similar_names import NEAR, did_you_mean
from ckpt_prune.model.blocks import one_block_config
from ckpt_prune.model.descriptions import (
    FUNCTION_KEYS,
    description_keys,
    family_for_config,
    known_families,
    load_family,
)
from ckpt_prune.model.family import Family
from ckpt_prune.model.skeleton import Names, build_skeleton, is_stored_buffer, parse_config, quiet_transformers

_INDEX = re.compile(r"(.+?\.)\d+(\..+)")
_BLOCK = "{block}"
_CLOSE = 5
"""Families with the nearest names of tensors, whose code is compared too."""
_LEAST = 0.5
"""Share of the names of tensors that two models must have in common to be alike."""
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
"""Key of a description → ends of the names of the classes that decide it."""
_PAGES = (
    f"{find_document('model/FAMILIES.md')} lists those that can be pruned, and "
    f"{find_document('recipes/guides/add-a-family.md')} says how to describe another"
)


@dataclass(frozen=True)
class FamilyComparison:
    """An unknown family beside the known family that is nearest.

    Attributes:
        architecture: the stock class that would load it.
        lacking: tensors of that family that this model lacks, with `{block}`.
        extra: tensors that only this model has.
        keys: config keys that only this model's class has → their values.
        code: classes of transformers that differ, by the ends of their names.
        undecided: keys of the description that depend on these and that `draft` leaves open.
        draft: a description to start from.
    """

    model_type: str
    architecture: str
    like: str
    lacking: tuple[str, ...]
    extra: tuple[str, ...]
    keys: dict[str, Any]
    code: tuple[str, ...]
    undecided: tuple[str, ...]
    draft: dict[str, Any]


@quiet_transformers()
def compare_with_families(config: dict[str, Any]) -> FamilyComparison:
    """Compare a model of an unknown family, by its config.json, with the known ones; UserError if it is like none."""
    _check_transformers_has(str(config.get("model_type")))
    parsed = parse_config(config)
    architecture = _architecture(config, parsed)
    names = Names(build_skeleton(parsed, architecture))
    tensors = _generic(names.shapes)
    near = dict(sorted(_tensors_of_families().items(), key=lambda item: -_overlap(tensors, item[1]))[:_CLOSE])
    code = _code(architecture)

    def nearness(model_type: str) -> tuple[float, int, int]:
        known_code = _code(load_family(model_type).architecture)
        alike = sum(code[name] == known_code.get(name) for name in code)
        return _overlap(tensors, near[model_type]), alike, -len(_new_keys(parsed, model_type))

    best = max(near, key=nearness)
    nearest_tensors = near[best]
    if _overlap(tensors, nearest_tensors) < _LEAST:
        raise UserError(
            f"model_type {parsed.model_type!r} is unlike every family that this version knows: {best} is "
            f"nearest, and of {len(tensors)} kinds of tensors {len(tensors & nearest_tensors)} have the names of one "
            f"of its {len(nearest_tensors)}; {_PAGES}"
        )
    family = load_family(best)
    known_code = _code(family.architecture)
    different = tuple(sorted(name for name in code if code[name] != known_code.get(name)))
    draft, undecided = _draft(family, parsed, config, architecture, names, different)
    return FamilyComparison(
        model_type=parsed.model_type,
        architecture=architecture,
        like=best,
        lacking=tuple(sorted(nearest_tensors - tensors)),
        extra=tuple(sorted(tensors - nearest_tensors)),
        keys=_new_keys(parsed, best),
        code=different,
        undecided=undecided,
        draft=draft,
    )


def _check_transformers_has(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        hint = did_you_mean(model_type, known_families(), most=3, likeness=NEAR).rstrip()
        meant = f" ({hint})" if hint else ""
        raise UserError(
            f"model_type {model_type!r} is known neither here nor to transformers {transformers.__version__}{meant}; a "
            f"newer transformers may have it; {_PAGES}"
        )


def _architecture(config: Mapping[str, Any], parsed: PreTrainedConfig) -> str:
    for name in config.get("architectures") or []:
        if isinstance(getattr(transformers, name, None), type):
            return str(name)
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        stock = getattr(transformers, auto)._model_mapping.get(type(parsed), None)
        if stock is not None:
            return str((stock[0] if isinstance(stock, tuple) else stock).__name__)
    raise UserError(f"transformers has no model for config.json of type {parsed.model_type}; {_PAGES}")


# ---- names of tensors --------------------------------------------------------------------------------------------


def _generic(names: Iterable[str]) -> frozenset[str]:
    """Names of tensors with `{block}` for the index of a block."""
    generic = set()
    for name in names:
        if not is_stored_buffer(name):
            match = _INDEX.fullmatch(name)
            generic.add(f"{match[1]}{_BLOCK}{match[2]}" if match else name)
    return frozenset(generic)


def _overlap(tensors: Collection[str], other: Collection[str]) -> float:
    return len(set(tensors) & set(other)) / len(set(tensors) | set(other))


@cache
def _tensors_of_families() -> dict[str, frozenset[str]]:
    """Known family → names of its tensors."""
    families = map(load_family, known_families())
    return {
        family.model_type: _generic(Names(build_skeleton(one_block_config(family), family.architecture)).shapes)
        for family in families
    }


def _new_keys(parsed: PreTrainedConfig, model_type: str) -> dict[str, Any]:
    """Config keys that the class of a known family lacks, with the values of this model."""
    other = AutoConfig.for_model(model_type).to_dict()
    return {key: value for key, value in sorted(parsed.to_dict().items()) if key not in other and key != "dtype"}


# ---- transformers' code ------------------------------------------------------------------------------------------


@cache
def _code(architecture: str) -> dict[str, str]:
    """Classes and functions in the file of a stock class → their code, without comments and documentation.

    The family's name is taken out of theirs, because the files of one family are copies of another's.
    """
    module = getattr(transformers, architecture).__module__
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    classes = [node.name for node in definitions if isinstance(node, ast.ClassDef)]
    prefix = _common_prefix(classes, architecture)
    code = {}
    for definition in definitions:
        for node in ast.walk(definition):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    node.body = node.body[1:] or [ast.Pass()]
                node.decorator_list = []
        text = ast.unparse(definition)
        code[definition.name.removeprefix(prefix)] = re.sub(rf"\b{re.escape(prefix)}(?=\w)", "", text)
    return code


def _common_prefix(classes: Sequence[str], architecture: str) -> str:
    """Return the family's name, with which most names of a file's classes begin."""
    words = re.findall(r"[A-Z][a-z0-9_]*|[A-Z]+(?![a-z])", architecture)
    prefixes = {"".join(words[: length + 1]) for length in range(len(words))}
    for prefix in sorted(prefixes, key=len, reverse=True):
        if 2 * sum(name.startswith(prefix) for name in classes) > len(classes):
            return prefix
    return ""


# ---- the description to start from -------------------------------------------------------------------------------


def _draft(
    nearest: Family,
    parsed: PreTrainedConfig,
    config: Mapping[str, Any],
    architecture: str,
    names: Names,
    code: Collection[str],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a description that extends the nearest family, and the keys that it leaves open."""
    family = family_for_config({**config, "model_type": nearest.model_type})
    prefix, modules = _block(names)
    head = next((each for each in ("lm_head", family.head) if each and f"{each}.weight" in names.shapes), None)
    auto = "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else family.auto_class
    draft: dict[str, Any] = {
        "extends": family.model_type,
        "inherits": [],
        "model_type": parsed.model_type,
        "architectures": {architecture: {"auto": auto} | ({"head": head} if head else {})},
    }
    if prefix is not None and prefix != family.block:
        draft["block"] = prefix
    draft |= _spaces(family, modules)
    draft["bias_slots"] = _bias_slots(family, parsed, config, architecture, modules)
    draft["stand_ins"] = []
    divide = _heads_divide_hidden(family, parsed, config)
    if divide != family.heads_divide_hidden:
        draft["heads_divide_hidden"] = divide
    residual = family.residual
    if residual is not None and not _differs(code, _DEPENDS["residual"]):
        reads = {norm: [m for m in fed if m in modules] for norm, fed in residual.reads.items()}
        writes = [module for module in residual.writes if module in modules]
        if reads != residual.reads or writes != residual.writes:
            draft["residual"] = residual.model_dump(exclude_defaults=True) | {"reads": reads, "writes": writes}
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
    ((first, _),) = Counter(match[1] for match in matches).most_common(1)
    prefix = f"{first}0."
    inside = {name.removeprefix(prefix): shape for name, shape in names.shapes.items() if name.startswith(prefix)}
    linears = frozenset(name.removesuffix(".weight") for name, shape in inside.items() if len(shape) == 2)
    return f"{first}{_BLOCK}.", linears


def _spaces(family: Family, modules: frozenset[str]) -> dict[str, Any]:
    """Return the spaces without rows of modules that the model lacks; nothing if it lacks none."""
    spaces = {name: space.model_dump(exclude_defaults=True) for name, space in family.spaces.items()}
    for values in spaces.values():
        values["rows"] = [row for row in values["rows"] if row["module"] in modules]
    is_trimmed = any(len(spaces[name]["rows"]) != len(space.rows) for name, space in family.spaces.items())
    return {"spaces": spaces} if is_trimmed else {}


def _heads_divide_hidden(family: Family, parsed: PreTrainedConfig, config: Mapping[str, Any]) -> bool:
    """Return whether the config class refuses a number of heads that does not divide the hidden size."""
    hidden = family.dimension(parsed, "hidden")
    odd = next(count for count in range(3, hidden + 2) if hidden % count)
    keys = [family.dimensions[name][0] for name in ("query_heads", "kv_heads") if family.dimensions[name]]
    try:
        parse_config(dict(config) | dict.fromkeys(keys, odd))
    except UserError:
        return True
    return False


def _bias_slots(
    family: Family, parsed: PreTrainedConfig, config: Mapping[str, Any], architecture: str, modules: frozenset[str]
) -> dict[str, str | bool]:
    """Linear module → the config key that gives it a bias, or true: found by turning keys on and off."""
    keys = [key for key, value in parsed.to_dict().items() if "bias" in key and isinstance(value, bool)]
    block = family.block.format(block=0)

    def with_bias(opened: Collection[str]) -> set[str]:
        values = dict(config) | {key: key in opened for key in keys}
        names = Names(build_skeleton(parse_config(values), architecture)).shapes
        return {m for m in modules if f"{block}{m}.bias" in names}

    always = with_bias(())
    slots: dict[str, str | bool] = {module: True for module in family.linears if module in always}
    for key in keys:
        slots |= {module: key for module in family.linears if module in with_bias([key]) - always}
    return slots
