"""The rows of tools/papers.md, "Row by row": whether the recipes and tests that they name are there.

    python tools/papers.py

It prints how many rows have which state, and fails with a line for each row that names what is gone. The sentence with
these numbers stands above the table.
"""

import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.recipe.shipped import shipped_recipes

ROOT = Path(__file__).resolve().parents[1]
PAGE, TESTS = ROOT / "tools/papers.md", ROOT / "tests"
BEGIN, END = "<!-- rows: `tools/papers.py` checks them and counts them -->", "<!-- end of rows -->"
STATES = ("exact", "partly", "different", "absent", "unknown", "not run")


@dataclass(frozen=True)
class Row:
    """One thing that a paper defines.

    Attributes:
        where: its equation, table or section.
        names: recipes, and tests as FILE::NAME, that do and prove it.
    """

    paper: str
    where: str
    what: str
    state: str
    names: tuple[str, ...]
    note: str

    @property
    def faults(self) -> list[str]:
        """What is wrong with the row, in words; empty if nothing is."""
        found = [f"names {name}, which is gone" for name in self.names if not is_there(name)]
        if self.state not in STATES:
            found.append(f"has the state {self.state!r}, which is none of {', '.join(STATES)}")
        if self.state == "exact" and not self.names:
            found.append("is exact, and names nothing that shows it")
        if self.state not in ("exact", "not run") and self.note == "–":
            found.append(f"is {self.state}, and does not say why")
        return found


def read_rows(page: str) -> list[Row]:
    """Return the rows of the page, in its order; ValueError if a line of the table has other columns."""
    rows = []
    for line in page.split(BEGIN)[1].split(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "paper":
            if len(cells) != 6:
                raise ValueError(f"a row has 6 columns: {line}")
            rows.append(Row(*cells[:4], tuple(re.findall(r"`([^`]+)`", cells[4])), cells[5]))
    return rows


def is_there(name: str) -> bool:
    """Tell whether a shipped recipe, or a test FILE::NAME, has this name."""
    file, _, test = name.partition("::")
    if not test:
        return name in shipped_recipes()
    path = TESTS / file
    return path.is_file() and any(
        isinstance(node, ast.FunctionDef) and node.name == f"test_{test}"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


def count(rows: list[Row]) -> str:
    """Return the sentence that says how many rows have which state."""
    numbers = Counter(row.state for row in rows)
    states = ", ".join(f"{numbers[state]} {state}" for state in STATES if numbers[state])
    return f"Of {len(rows)} rows: {states}."


def find_faults(page: str) -> list[str]:
    """Return a line for each thing that does not hold on the page."""
    rows = read_rows(page)
    faults = [f"{row.paper}, {row.what}: the row {fault}" for row in rows for fault in row.faults]
    return faults + ([] if count(rows) in page else [f"the page does not say: {count(rows)}"])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    print(count(read_rows(page)))
    if faults := find_faults(page):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
