"""Reading recipe files, with errors that name file, line and key."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import suggest_percentage
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.common.value_words import explain_value, message_of
from ckpt_prune.common.yaml12 import read_yaml
from ckpt_prune.model.spaces import SPACES
from ckpt_prune.recipe.places import locate_recipe
from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.recipe.shipped import RecipeFile, recipe_text
from ckpt_prune.recipe.space_kinds import FACTS
from ckpt_prune.stages import STAGES, FullRecipe

_MOST_SHOWN, _MOST_MEANT = 200, 3
_SPACE_WORDS = {
    **dict.fromkeys(("ffn", "mlps", "feed_forward", "feedforward", "intermediate", "intermediate_size"), "mlp"),
    **dict.fromkeys(("attention", "attn", "self_attn", "num_attention_heads"), "heads"),
    "moe": "experts",
    "rope": "rotary",
}
"""Name of a space in other tools → its name here."""
Lines = dict[tuple[str, ...], int]
"""Key path → its line in the file (from 1), or 0 for what is set on the command line."""


def load_recipe(
    reference: str | RecipeFile,
    overrides: tuple[str, ...] = (),
    ratio: float | None = None,
    size: Mapping[str, str] | None = None,
    mask_changes: Mapping[str, tuple[str, str | None]] | None = None,
) -> Recipe:
    """Read and check a recipe. Errors name file, line and key path.

    Args:
        reference: as `locate_recipe` takes it, or what that returned.
        overrides: `key=value` pairs with dotted keys and YAML values, applied before checking.
        ratio: replaces the file's ratio and every space's own, but not an override of a space's own.
        size: replaces all ratios and the size of the file: params, bytes, flops or latency. Stages that are for other
            sizes are left out.
        mask_changes: option → a key of recipes with a mask, and its value or None. They are applied before overrides.
    """
    file = reference if isinstance(reference, RecipeFile) else locate_recipe(reference)
    path = file.path
    values, lines = parse_yaml(recipe_text(file), path)
    if "sites" in values:
        raise UserError(f"{path} is a plan, not a recipe: say --plan {path}")
    if not {"name", *(kind.key for kind in STAGES)} & values.keys():
        raise UserError(f"{path} is not a recipe: it has neither name nor spaces (`ckpt-prune recipe show rcpu`)")
    values = FullRecipe.expand_names(values)
    changed = {option: change for option, change in (mask_changes or {}).items() if change[1] is not None}
    if changed and "mask" not in values:
        option, (_, value) = next(iter(changed.items()))
        raise UserError(
            f"{option} {value}: recipe {file.name} has no mask; take one that has, such as --recipe sparsegpt or wanda"
        )
    options = [*changed, "--set"] if overrides else [*changed]
    for override in (*(f"{key}={value}" for key, value in changed.values()), *overrides):
        keys = _apply_override(values, override)
        values = FullRecipe.expand_names(values)
        _drop_strength(values, keys, lines)
        if lines.get(("ratio",)) and any(kind.settles_ratio(keys, settings) for kind, settings in _stages_in(values)):
            values.pop("ratio", None)
        # What is set on the command line has no line in the file.
        lines = {place: line for place, line in lines.items() if place[: len(keys)] != keys} | {keys: 0}
        lines |= {keys[:n]: 0 for n in range(1, len(keys)) if keys[:n] not in lines}
    if ratio is not None:
        _set_ratio(values, ratio, lines)
    if size is not None:
        _set_size(values, size, file.name, lines)
    try:
        return FullRecipe.model_validate(values).at_its_size
    except ValidationError as error:
        # A default that follows from another key is not found where that one is wrong.
        wrong = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
        unknown = {e["loc"][:-1] for e in wrong if e["loc"][-1:] == ("[key]",)}
        wrong = [e for e in wrong if e["loc"][-1:] == ("[key]",) or e["loc"][:2] not in unknown]
        messages = [_explain(e, path, lines, " and ".join(options)) for e in wrong]
        more = f"; and {len(messages) - 3} more" if len(messages) > 3 else ""
        raise UserError("; ".join(messages[:3]) + more) from error


def _stages_in(values: Mapping[str, Any]) -> list[tuple[type[StageKeys], dict[str, Any]]]:
    """Return the stages that a file names, with the values under their keys."""
    return [(kind, settings) for kind in STAGES if isinstance(settings := values.get(kind.key), dict)]


def _set_ratio(values: dict[str, Any], ratio: float, lines: Lines) -> None:
    for kind, settings in _stages_in(values):
        kind.check_ratio(settings, ratio)
    values["ratio"] = ratio
    values.pop("size", None)
    _drop_own_ratios(values, lines)


def _set_size(values: dict[str, Any], size: Mapping[str, str], name: str, lines: Lines) -> None:
    """Put a size in place of every ratio and size."""
    for kind in STAGES:
        if kind.key in values:
            kind.check_size(name)
    values["size"] = dict(size)
    values.pop("ratio", None)
    _drop_own_ratios(values, lines)


def _drop_own_ratios(values: dict[str, Any], lines: Lines) -> None:
    """Remove the ratios of single spaces that the file has, but not those of overrides."""
    spaces = values.get("spaces")
    if not isinstance(spaces, dict):
        return
    values["spaces"] = {
        name: {key: value for key, value in settings.items() if key != "ratio"}
        if isinstance(settings, dict) and lines.get(("spaces", name, "ratio"))
        else settings
        for name, settings in spaces.items()
    }


def parse_yaml(content: str, path: Path) -> tuple[dict[str, Any], Lines]:
    """Read a YAML mapping, and the line of each of its key paths. A key that is given twice is refused.

    An alias becomes one object in all its places.
    """
    lines: Lines = {}

    def walk(node: yaml.Node, prefix: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            here = (*prefix, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                raise UserError(f"{path}, line {line}: {'.'.join(here)} is given twice")
            lines[here] = line
            walk(value, here)

    try:
        root, values = read_yaml(content)
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict) or root is None:
        raise UserError(f"{path} is not a recipe: a mapping of keys is expected (`ckpt-prune recipe show rcpu`)")
    walk(root, ())
    return values, lines


def _apply_override(values: dict[str, Any], override: str) -> tuple[str, ...]:
    """Change one key of a recipe's values, and return its path.

    Every mapping on the way is copied first: an alias may have put it in other places, too, which stay as they are.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override}: expected key=value, for example spaces.mlp.ratio=0.3")
    try:
        _, value = read_yaml(text)
    except ValueError as error:
        raise UserError(f"--set {override[:_MOST_SHOWN]}: {_shown(text)} is not a YAML value") from error
    *parents, last = key.split(".")
    mapping = values
    for depth, parent in enumerate(parents):
        below = mapping.get(parent, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {override}: {'.'.join(parents[: depth + 1])} holds a value, not keys")
        mapping[parent] = mapping = dict(below)
    mapping[last] = value
    return (*parents, last)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _drop_strength(values: dict[str, Any], keys: tuple[str, ...], lines: Lines) -> None:
    """If a method without a strength was set in place of the file's own, remove what the file says of a strength.

    Args:
        values: of the recipe, changed in place.
        keys: path of the key that was just set.
        lines: of keys.
    """
    if keys[:1] != ("spaces",) or keys[2:] != ("compensation", "method"):
        return
    compensation = values["spaces"][keys[1]]["compensation"]
    facts = FACTS.get(compensation["method"]) if isinstance(compensation["method"], str) else None
    if facts is not None and not facts.uses_strength:
        for key in ("lambda", "lambda_grid", "lambda_by"):
            if lines.get((*keys[:-1], key), 0):
                compensation.pop(key, None)


def _allowed_keys(loc: tuple[Any, ...]) -> list[str]:
    """Return the keys that are allowed in the mapping of a location's last key."""
    place: Any = FullRecipe
    for key in loc[:-1]:
        place = _mapping(get_args(place)[1] if get_origin(place) is dict else _fields(place)[key])
    return list(SPACES if get_origin(place) is dict else _fields(place))


def _meant_path(keys: tuple[str, ...], value: Any) -> str:
    """Return `did you mean …? ` with the known keys, below those that hold, that end in the ones that were given."""
    above, tail = keys[:-1], keys[-1:]
    while isinstance(value, dict) and len(value) == 1:
        tail += tuple(map(str, value))
        (value,) = value.values()
    tail = tuple(_SPACE_WORDS.get(key, key) for key in tail)
    paths = [path for path in _known_paths() if path[: len(above)] == above and path[-len(tail) :] == tail]
    if len(paths) > _MOST_MEANT:
        paths = [(*path[:1], "SPACE", *path[2:]) if path[0] == "spaces" else path for path in paths]
    meant = list(dict.fromkeys(map(".".join, paths)))
    return f"did you mean {' or '.join(meant)}? " if 0 < len(meant) <= _MOST_MEANT else ""


@cache
def _known_paths() -> list[tuple[str, ...]]:
    """Return the path of every key that a recipe can have."""

    def walk(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for key, annotation in _fields(model).items():
            yield (*above, key)
            inner = next(_mappings(annotation), None)
            if get_origin(inner) is dict and isinstance(get_args(inner)[1], type):
                for name in SPACES:
                    yield (*above, key, name)
                    yield from walk(get_args(inner)[1], (*above, key, name))
            elif isinstance(inner, type) and get_origin(inner) is None:
                yield from walk(inner, (*above, key))

    return list(walk(FullRecipe, ()))


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _mapping(annotation: Any) -> Any:
    """Return the model or the `dict` among the alternatives of an annotation, which has one of them."""
    return next(_mappings(annotation))


def _mappings(annotation: Any) -> Iterator[Any]:
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for each in alternatives:
        if get_origin(each) is dict or (isinstance(each, type) and issubclass(each, BaseModel)):
            yield each


def _explain(error: Any, path: Path, lines: Lines, options: str) -> str:
    """Return the message for one of pydantic's errors."""
    loc = tuple(part for part in error["loc"] if part != "[key]")
    keys = tuple(str(part) for part in loc)
    line = next((lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in lines), None)
    where = f"{path}, line {line}" if line else "--set" if line == 0 else str(path)
    if line != 0 and any(lines[each] == 0 and each[: len(keys)] == keys for each in lines):
        where += f", with {options}"  # keys that do not go together, one of them set
    key = ".".join(keys)
    if error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",):
        allowed = _allowed_keys(loc)
        hint = _meant_path(keys, error["input"]) or did_you_mean(_SPACE_WORDS.get(keys[-1], keys[-1]), allowed)
        if keys[-1] in FullRecipe.model_fields and len(keys) > 1:
            hint = f"{keys[-1]} stands at the top of a recipe; "
        return f"{where}: unknown key {key}: {hint}allowed here: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{where}: {key} is missing"
    if error["type"] == "model_type":
        return (
            f"{where}: {key}: keys are expected ({', '.join(_allowed_keys((*loc, '')))}), got {_shown(error['input'])}"
        )
    if error["type"] == "literal_error":
        return f"{where}: {key}: {explain_value({**error, 'input': str(error['input'])[:_MOST_SHOWN]})}"
    message = message_of(error)
    if error["type"] == "value_error":
        return f"{where}: {key + ': ' if key else ''}{message}"
    too_large = error["type"] == "less_than" and keys[-1] == "ratio"
    # A ratio in quotes is read as a number, and is still text where it is too large.
    meant = suggest_percentage(float(error["input"])) if too_large else ""
    return f"{where}: {key}: {message[0].lower()}{message[1:]}, got {_shown(error['input'])}{meant}"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of recipe files, for editors."""
    schema = FullRecipe.model_json_schema(by_alias=True)
    for stage in STAGES:
        if stage.named:
            schema["properties"][stage.key]["anyOf"].append({"enum": list(stage.named)})
    return schema


def explain_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return key path → what it means, for every known key of a recipe's values that has a description.

    Keys of spaces and of experts are explained once, under `spaces.*`.
    """
    sentences: dict[str, str] = {}

    def walk(place: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        for key, value in place.items():
            if key not in fields:
                continue
            name = f"{prefix}{key}"
            sentences.setdefault(name, fields[key].description or "")
            if isinstance(value, Mapping):
                inner = _mapping(fields[key].annotation)
                if get_origin(inner) is dict:
                    for settings in value.values():
                        walk(settings, get_args(inner)[1], f"{name}.*.")
                else:
                    walk(value, inner, f"{name}.")

    walk(values, FullRecipe, "")
    return {name: sentence for name, sentence in sentences.items() if sentence}
