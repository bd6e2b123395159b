"""Mutants: how many small mistakes in a room its tests notice.

    PYTHONPATH=. python tools/mutants.py stages model --number 6            # six mistakes in each of two rooms
    PYTHONPATH=. python tools/mutants.py stages/mask --also tests/cli/test_prune.py --seed 1

Each mutant changes one place of one file: a comparison, a constant, an operator, a condition, or a statement that goes.
Which places are taken follows from the seed. The checkout stays as it is: tests run in a copy of it. A mutant meets the
test files that import its module; where there are none, those in a folder of the same name, or else those of its room
that lead to it by way of others. The first failure ends the run: killed. A test that fails without a mistake kills
none, and is named.
"""

import argparse
import ast
import copy
import itertools
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
ROOT = Path()
"""The working folder: a copy of the checkout, once `main` has made it."""
ROOMS = {"gguf": "gguf_files", "onnx": "onnx_graphs"}
"""Rooms whose tests lie in a folder of another name."""
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
NAMES = {"min": "max", "max": "min", "all": "any", "any": "all"}
SECONDS = 1800
"""After which a mutant counts as killed: it goes round and round."""


@dataclass(frozen=True)
class Mutant:
    path: Path
    """Of the file, from the root."""
    line: int
    was: str
    becomes: str
    text: str
    """The whole file with the mistake."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.was!r} becomes {self.becomes!r}"


def mutate(node: ast.AST) -> ast.AST | None:
    """Return a node with one mistake; nothing if this kind of node has none."""
    wrong = copy.deepcopy(node)
    if isinstance(wrong, ast.Compare) and type(wrong.ops[0]) in COMPARISONS:
        wrong.ops[0] = COMPARISONS[type(wrong.ops[0])]()
    elif isinstance(wrong, ast.BinOp) and type(wrong.op) in OPERATORS:
        wrong.op = OPERATORS[type(wrong.op)]()
    elif isinstance(wrong, ast.BoolOp):
        wrong.op = ast.Or() if isinstance(wrong.op, ast.And) else ast.And()
    elif isinstance(wrong, ast.Constant) and isinstance(wrong.value, bool):
        wrong.value = not wrong.value
    elif isinstance(wrong, ast.Constant) and isinstance(wrong.value, int | float):
        wrong.value = wrong.value + 1 if isinstance(wrong.value, int) else wrong.value * 2 or 1.0
    elif isinstance(wrong, ast.Call) and isinstance(wrong.func, ast.Name) and wrong.func.id in NAMES:
        wrong.func.id = NAMES[wrong.func.id]
    elif isinstance(wrong, ast.If | ast.While | ast.IfExp):
        return ast.UnaryOp(ast.Not(), wrong.test)
    elif isinstance(wrong, ast.Raise | ast.AugAssign) or (
        isinstance(wrong, ast.Expr) and isinstance(wrong.value, ast.Call)
    ):
        return ast.Pass()
    else:
        return None
    return wrong


def walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a module computes with: no annotations, decorators or text in f-strings."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "format_spec"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk_code(child)


def find_places(path: Path) -> Iterator[tuple[int, ast.AST, ast.AST]]:
    """Yield each place of a file where a mistake can be: its line, the node that is replaced, and by what."""
    for node in walk_code(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if (wrong := mutate(node)) is not None:
            place = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else node
            yield place.lineno, place, wrong  # type: ignore[attr-defined]


def write_mistake(path: Path, place: ast.AST, wrong: ast.AST) -> Mutant | None:
    """Return a file's mutant; nothing where the place has no columns of its own, as in f-strings before Python 3.12."""
    text = (ROOT / path).read_bytes()
    lines = text.splitlines(keepends=True)
    first_line, last_line = place.lineno, place.end_lineno  # type: ignore[attr-defined]
    first = sum(map(len, lines[: first_line - 1])) + place.col_offset  # type: ignore[attr-defined]
    last = sum(map(len, lines[: last_line - 1])) + place.end_col_offset  # type: ignore[attr-defined]
    becomes = ast.unparse(wrong)
    code = becomes if isinstance(wrong, ast.stmt) else f"({becomes})"
    changed = (text[:first] + code.encode() + text[last:]).decode()
    try:
        compile(changed, str(path), "exec")
    except SyntaxError:
        return None
    return Mutant(path, first_line, ast.unparse(place), becomes, changed)


def choose_mutants(room: str, number: int, seed: int) -> list[Mutant]:
    """Return mutants of a room. A line is drawn, then a mistake in it: so no long formula has them all."""
    lines: dict[tuple[Path, int], list[tuple[ast.AST, ast.AST]]] = {}
    for file in sorted((ROOT / "ckpt_prune" / room).rglob("*.py")):
        for line, place, wrong in find_places(path := file.relative_to(ROOT)):
            lines.setdefault((path, line), []).append((place, wrong))
    draw = random.Random(f"{room} {seed}")
    order = draw.sample(sorted(lines), len(lines))
    mutants = (write_mistake(key[0], *draw.choice(lines[key])) for key in order)
    return list(itertools.islice(filter(None, mutants), number))


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the files of the package and its tests that a file imports anywhere."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            base = ROOT / name.replace(".", "/")
            found |= {file for file in (base.with_suffix(".py"), base / "__init__.py") if file.exists()}
    return frozenset(found - {path})


def leads_to(path: Path, target: Path) -> bool:
    """Return whether a file imports another, perhaps by way of others."""
    met, waiting = {path}, [path]
    while waiting:
        new = imported(waiting.pop()) - met
        met |= new
        waiting += new
    return target in met


def choose_tests(mutant: Mutant, room: str, also: list[str], far: bool) -> list[str]:
    """Return the test files that a mutant meets, those of its own room first."""
    target, tests = ROOT / mutant.path, ROOT / "tests"
    own_room = tests / ROOMS.get(room, room)
    files = sorted(tests.rglob("test_*.py"))
    chosen = [file for file in files if target in imported(file)]
    if not chosen:  # tests of a stage stand in a folder of its name
        folders = set(mutant.path.parts[2:-1])
        chosen = [file for file in files if own_room in file.parents and folders & set(file.parts)]
    if far or not chosen:
        chosen += [file for file in files if own_room in file.parents and leads_to(file, target)]
    chosen.sort(key=lambda file: own_room not in file.parents)
    chosen += [file for pattern in also for file in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys(str(file.relative_to(ROOT)) for file in chosen))


def run_tests(tests: list[str], options: list[str]) -> tuple[int, str]:
    """Return pytest's exit code, and the test that failed first."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 1, "it never ended"
    if done.returncode > 2:
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stderr or done.stdout}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    first = failed[0].partition(" ")[2].partition(" - ")[0] if failed else f"exit code {done.returncode}"
    return done.returncode, first


def try_room(room: str, asked: argparse.Namespace) -> tuple[int, int]:
    """Print what becomes of each mutant of a room; return how many were killed, and how many there were."""
    options = ["--thorough"] if asked.thorough else []
    killed = 0
    sound: dict[str, bool] = {}
    mutants = choose_mutants(room, asked.number, asked.seed)
    for mutant in mutants:
        tests = choose_tests(mutant, room, asked.also, asked.far)
        file = ROOT / mutant.path
        before = file.read_text(encoding="utf-8")
        file.write_text(mutant.text, encoding="utf-8")
        code, failed = run_tests(tests, options) if tests else (0, "")
        file.write_text(before, encoding="utf-8")
        if code != 0 and "::" in failed and failed not in sound:
            sound[failed] = run_tests([failed], options)[0] == 0
        noticed = code != 0 and sound.get(failed, True)
        killed += noticed
        how = f"killed by {failed}" if noticed else "SURVIVED" if code == 0 else f"unknown: {failed} fails without it"
        print(f"{mutant.name}\n    {how} ({len(tests)} files of tests)", flush=True)
    return killed, len(mutants)


def copy_checkout(place: Path) -> None:
    """Copy what git keeps track of, with its changes."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (CHECKOUT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, place / name)
    if (shared := CHECKOUT.parent / "shared").exists():
        (place.parent / "shared").symlink_to(shared.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", help="folders below ckpt_prune/")
    parser.add_argument("--number", type=int, default=6, help="mutants of each room (default 6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--also", action="append", default=[], help="further test files, as a pattern from the root")
    parser.add_argument(
        "--far", action="store_true", help="all files of the room that lead to a module, not the nearest"
    )
    parser.add_argument("--thorough", action="store_true", help="run every cell of the tests")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "checkout"
        copy_checkout(place)
        with chdir(place):
            counts = {room: try_room(room, asked) for room in asked.rooms}
    for room, (killed, number) in counts.items():
        print(f"{room}: {killed} of {number} killed")
    if len(counts) > 1:
        killed, number = (sum(each) for each in zip(*counts.values(), strict=True))
        print(f"all: {killed} of {number} killed")


if __name__ == "__main__":
    main()
