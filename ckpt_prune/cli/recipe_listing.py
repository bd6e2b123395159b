"""Tables of `recipe list`, and the explanations of `recipe show`."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_prune.recipe.catalogue import GOALS, WANTS, Entry
from ckpt_prune.recipe.names import Goal
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE
from ckpt_prune.show.section import Table
from ckpt_prune.show.terminal import print_table
from ckpt_prune.stages.recipe_files import explain_keys, parse_yaml

_LEGEND = (
    "time: of pruning, as a multiple of ridge. stock: classes of transformers;\nown code: ckpt_prune.load, or "
    "trust_remote_code=True. data: of several\none is enough; any: text, images or statistics."
)


def first_list(groups: Mapping[Goal, Sequence[Entry]]) -> list[str]:
    """Return the lines of a short list: one table."""
    rows = [
        [WANTS[goal], entry.recipe.name, _time(entry), entry.loads, entry.needs]
        for goal, entries in groups.items()
        for entry in entries
    ]
    return [
        _table(["you want", "recipe", "time", "loads with", "data"], rows),
        f"\n{DEFAULT_RECIPE} is the default.\n{_LEGEND}",
        "More: `ckpt-prune recipe show NAME`, `recipe list --papers` or `--all`.",
    ]


def long_list(groups: Mapping[Goal, Sequence[Entry]]) -> list[str]:
    """Return the lines of a long list: a table for each goal, with summaries."""
    lines = []
    for goal, entries in groups.items():
        rows = [[e.recipe.name, _time(e), e.loads, e.needs, e.recipe.summary] for e in entries]
        lines += [f"{GOALS[goal]}:", _table(["recipe", "time", "loads with", "data", "summary"], rows), ""]
    return [*lines, _LEGEND]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return print_table(Table(columns, rows, words=len(columns)))


def _time(entry: Entry) -> str:
    return "-" if entry.recipe.time is None else f"{entry.recipe.time:g}"


def recipe_data(entry: Entry) -> dict[str, Any]:
    recipe = entry.recipe
    return {
        "name": recipe.name,
        "goal": entry.goal,
        "summary": recipe.summary,
        "source": recipe.source,
        "target": recipe.target,
        "loads": entry.loads,
        "data": list(entry.data),
        "calibration": entry.calibration,
        "time": recipe.time,
        "default": recipe.name == DEFAULT_RECIPE,
    }


def explain(text: str, path: Path) -> str:
    """Return the text of a recipe at `path` with a comment below it: what each of its keys means. It is YAML still."""
    values, _ = parse_yaml(text, path)
    sentences = explain_keys(values)
    if not sentences:
        return text
    lines = ["", "# What the keys mean:"]
    for key, sentence in sentences.items():
        lines += textwrap.wrap(f"{key}: {sentence}", 116, initial_indent="#   ", subsequent_indent="#     ")
    return text.rstrip("\n") + "\n" + "\n".join(lines) + "\n"
