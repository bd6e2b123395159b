"""The output of a benchmark: one measurement a line, so that a run goes on where the last one stopped."""

import json
from pathlib import Path
from typing import Any


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Read what was measured so far.

    Args:
        out: JSON lines; it need not be there.
    """
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def by_key(out: Path) -> dict[str, dict[str, Any]]:
    """The same by what is called `key` in a line."""
    return {line["key"]: line for line in lines_of(out)}


def add_line(out: Path, line: dict[str, Any]) -> None:
    """Keep a measurement."""
    with out.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")
