"""Writes ckpt_prune/model/RUNTIMES.md and the table of runtimes in README.md, from ckpt_prune/model/runtimes.py."""

import re
from pathlib import Path

from ckpt_prune.model import runtimes
from ckpt_prune.model.runtimes import CHANGES, RUNTIMES, Runtime

README = Path(__file__).parents[1] / "README.md"
FRONT_HEAD = "| runtime | what runs | stock classes | blocks of different shapes (`best`) |"
PAGE = Path(runtimes.__file__).parent / "RUNTIMES.md"
_HEAD = """# Where outputs run

Written by `python tools/runtimes.py` from [runtimes.py](runtimes.py); do not edit. `plan` and `prune` refuse by the
same data with `--for RUNTIME` (in a recipe `runs_on: [RUNTIME]`), before any data is read. `RUNTIME:TYPE` also makes
the widths multiples of what that type wants. `validate OUT --runtime RUNTIME` proves an output in the runtime itself.

Outputs that have the same widths and heads in all blocks, fewer blocks, or a narrower stream in one basis are stock
models: every runtime that has the family takes them. The table is about the others: • taken, – refused.
"""


def _all(runtime: Runtime, what: str = "all") -> str:
    return "all decoders that generate text" if runtime.generates else what


def _families(names: tuple[str, ...] | None, every: str = "all") -> str:
    return every if names is None else ", ".join(f"`{name}`" for name in sorted(names))


def _encoders(runtime: Runtime) -> str:
    return f"; encoders {_families(runtime.encoders)}" if runtime.encoders else ""


def _multiples(runtime: Runtime) -> str:
    multiples = runtime.rows | runtime.units
    options = {
        number: [f"`{name or 'all'}`" for name in multiples if multiples[name] == number]
        for number in multiples.values()
    }
    return "; ".join(f"{', '.join(names)}: {number}" for number, names in options.items()) or "–"


def page() -> str:
    """Return the text of the page."""
    text = f"{_HEAD}\n| what was pruned | for example | {' | '.join(RUNTIMES)} |\n"
    text += "|---|---|" + "---|" * len(RUNTIMES) + "\n"
    for change, (words, example) in CHANGES.items():
        marks = ["•" if change in runtime.changes else "–" for runtime in RUNTIMES.values()]
        text += f"| {words} | {example} | {' | '.join(marks)} |\n"
    text += "\n| runtime | run it | options, and multiples | only text generation |\n|---|---|---|---|\n"
    for name, runtime in RUNTIMES.items():
        only = ("and embeddings" if runtime.encoders else "yes") if runtime.generates else "no"
        steps = [command.replace("AUTO", "AutoModel…") for command in (runtime.export, runtime.command) if command]
        text += f"| {name} | {', then '.join(f'`{step}`' for step in steps)} | {_multiples(runtime)} | {only} |\n"
    text += "\n| runtime | families | families whose blocks may differ |\n|---|---|---|\n"
    for name, runtime in RUNTIMES.items():
        uneven = _families(runtime.families_of.get("widths"), "all of these")
        text += f"| {name} | {_families(runtime.families, _all(runtime))}{_encoders(runtime)} | {uneven} |\n"
    text += "\n"
    for name, runtime in RUNTIMES.items():
        validate_note = f" For `validate`: {runtime.beside}." if runtime.beside else ""
        untried = "" if runtime.tried else " Read in its source, not run."
        text += f"- {name}: `{runtime.install}`.{untried}{' ' + runtime.note if runtime.note else ''}{validate_note}\n"
    return text


def front_table() -> str:
    """Return the table of the front page."""
    text = f"{FRONT_HEAD}\n|---|---|---|---|\n"
    for name, runtime in RUNTIMES.items():
        if not runtime.tried:
            continue
        families = _all(runtime, "all families") if runtime.families is None else f"{len(runtime.families)} families"
        families += f" and {len(runtime.encoders)} of encoders" if runtime.encoders else ""
        uneven = f"{len(own)} families" if (own := runtime.families_of.get("widths")) else families
        graph = "`export`" if runtime.graphs else "`export --format gguf`"
        by = graph if runtime.export else "the checkpoint"
        text += f"| {name} | {by} | {families} | {uneven} |\n"
    return text


def with_front_table(readme: str) -> str:
    """Return the front page with the table in place of that which it has."""
    return re.sub(rf"{re.escape(FRONT_HEAD)}\n(\|.*\n)*", lambda _: front_table(), readme)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(with_front_table(README.read_text(encoding="utf-8")), encoding="utf-8")
