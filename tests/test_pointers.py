"""Docstrings, comments and the rooms' pages name files, modules, functions and fields that exist."""

import ast
import gc
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckpt_prune.stages.recipe_files import json_schema
from tests.test_documents import keys_of, prose

ROOT = Path(__file__).resolve().parents[1]
WORD = re.compile(r"[A-Za-z_]\w*")
FILE = re.compile(r"(?<![\w./*{<:-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh)\b(?!/)")
DOTTED = re.compile(r"(?<![\w./*<-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/*]|\.\w)")
BARE = re.compile(r"`([a-z]\w*_\w{3,})`")
ENDINGS = frozenset({"cjs", "cpp", "csv", "js", "json", "jsonl", "md", "onnx", "py", "safetensors", "txt", "yaml"})
"""What a file's name ends with: such a word is no module."""
ELSEWHERE = frozenset(
    {"numpy.py", "model.norm.weight", "weight_scale_inv"}  # a file of the working folder, tensors of a checkpoint
    | {"onnx.checker", "no_embed_class", "problem_type", "param_first", "param_mix", "raw_data"}  # of libraries
    | {"adapters.earlier", "adapters.seen"}  # of a report
    | {"make.sh", "model.gguf"}  # of a frontier's folder
)


class Names:
    """What a checkout has: files, modules with their names, classes with theirs, and every word of code."""

    def __init__(self, root: Path) -> None:
        """Read every module of the package in `root`."""
        self.root, self.package = root, root / "ckpt_prune"
        modules = sorted(self.package.rglob("*.py"))
        # Walked once: that takes longer than to parse.
        self.nodes = {path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in modules}
        self.pages = sorted(self.package.rglob("*.md"))
        folders = ("ckpt_prune", "recipes", "tests", "tools")
        self.files = {path.as_posix() for folder in folders for path in (root / folder).rglob("*.*")}
        self.files |= {path.as_posix() for path in root.glob("*.*")}
        self.modules: dict[tuple[str, ...], set[str]] = {}
        self.members: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.recipe_keys = keys_of(json_schema())
        self.words = {"lambda"} | self.recipe_keys
        self.libraries = {"cp", "loader", "mlx_lm", "peft"}
        for path, nodes in self.nodes.items():
            parts = path.relative_to(self.package).with_suffix("").parts
            self.modules[parts[:-1] if parts[-1] == "__init__" else parts] = assigned_names(nodes)
            self.words |= {*parts, *words_of(nodes)}
            for node in nodes:
                if isinstance(node, ast.ImportFrom):
                    self.libraries.add(str(node.module).partition(".")[0])
                if isinstance(node, ast.ClassDef):
                    self.members[node.name] |= assigned_names(ast.walk(node))
                    self.bases[node.name] |= {
                        part.id for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)
                    }
        self.exported = set().union(*self.modules.values())
        self.libraries -= {part for module in self.modules for part in module}
        for path in self.package.rglob("*.json"):
            self.words |= {path.stem, *WORD.findall(path.read_text(encoding="utf-8")[:100_000])}

    def has_member(self, owner: str, name: str) -> bool:
        """Tell whether a class, or one that it is derived from, has an attribute."""
        bases = self.bases[owner] - {owner}
        return name in self.members[owner] or any(self.has_member(base, name) for base in bases & set(self.members))

    def has_dotted(self, dotted: str) -> bool:
        """Tell whether a dotted name leads somewhere, or begins as no name of this package does."""
        parts = tuple(dotted.removeprefix("ckpt_prune.").split("."))
        if parts[-1] in ENDINGS or parts[0] in self.libraries | self.modules[()]:
            return True
        if any(map(str.isupper, parts[:-1])):  # stands for any name
            return True
        if parts[0] in self.recipe_keys and set(parts) <= self.words and dotted.islower():
            return True
        if parts[0] in self.members:
            return self.has_member(*parts[:2])
        if parts[0][0].isupper():
            return parts[0] in self.words
        known = False
        for module, names in self.modules.items():
            lengths = [length for length in range(1, len(module) + 1) if module[-length:] == parts[:length]]
            rest = parts[max(lengths, default=0) :]
            if lengths and (not rest or (rest[0] in names and (len(rest) == 1 or self.has_member(rest[0], rest[1])))):
                return True
            known |= bool(lengths) or any(len(module) > 1 and module[-1] == part for part in parts[1:])
        return not known and not any((part.isupper() or "_" in part) and part in self.exported for part in parts[1:])

    def has_file(self, name: str) -> bool:
        """Tell whether a file has this name, or this end of its path; STAGE and the like stand for any folders."""
        name = name.lstrip("./")
        folders, _, file = name.rpartition("/")
        end = f"/{file}" if any(map(str.isupper, folders.split("/"))) else f"/{name}"
        return any(path.endswith(end) for path in self.files)


def assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that is defined, imported or assigned in a module or class, attributes included."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).rpartition(".")[2])
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Texts that stand alone: of modules, classes, functions, and below a constant."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def words_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every identifier of a module, and every word of its texts that are no docstrings."""
    skipped = {id(text) for text in docstrings(nodes)}
    for node in nodes:
        fields = () if id(node) in skipped else vars(node).values()
        yield from (word for value in fields if isinstance(value, str) for word in WORD.findall(value))


def texts(path: Path, nodes: Sequence[ast.AST] | None) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module with their lines, or the paragraphs of a page without its fenced code."""
    if nodes is None:
        yield from enumerate(prose(path).split("\n\n"))
        return
    yield from ((text.lineno, str(text.value)) for text in docstrings(nodes))
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if "#" in source else ():
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def dead_pointers(root: Path) -> Iterator[str]:
    """What the package's docstrings, comments and pages name that is not there, each with its place."""
    names = Names(root)
    for path in (*names.nodes, *names.pages):
        for line, text in texts(path, names.nodes.get(path)):
            wrong = [name for name in FILE.findall(text) if not names.has_file(name)]
            wrong += [name for name in DOTTED.findall(text) if not names.has_dotted(name)]
            wrong += [name for name in BARE.findall(text) if name not in names.words]
            yield from (f"{path.relative_to(root)}:{line} {name}" for name in wrong if name not in ELSEWHERE)


def test_names_in_docstrings_and_pages_exist():
    gc.disable()  # half of the time goes into looking for circles among a million nodes
    try:
        assert list(dead_pointers(ROOT)) == []
    finally:
        gc.enable()


def test_names_that_do_not_exist_are_noticed(tmp_path: Path):
    (tmp_path / "ckpt_prune" / "job").mkdir(parents=True)
    (tmp_path / "ckpt_prune" / "__init__.py").write_text("")
    (tmp_path / "ckpt_prune" / "job" / "step.py").write_text(
        '"""`walk.act_on` and job.step.Step.act; `job.step.Step.rest`, `Step.gone`, `runner.step`."""\n'
        "class Base:\n    here = 1\nclass Step(Base):\n"
        '    """See job/step.py, `Step.here`, torch.linalg.qr, spaces.mlp.ratio, `act_twice` and job/walk.py."""\n'
        "    def act(self):\n        return act_twice()  # as in `step.LIMIT` and Gone.act\n"
    )
    (tmp_path / "ckpt_prune" / "job" / "README.md").write_text("[step.py](step.py), `store.py`\n\n`act_thrice`\n")
    assert list(dead_pointers(tmp_path)) == [
        "ckpt_prune/job/step.py:1 job.step.Step.rest",
        "ckpt_prune/job/step.py:1 Step.gone",
        "ckpt_prune/job/step.py:1 runner.step",
        "ckpt_prune/job/step.py:5 job/walk.py",
        "ckpt_prune/job/step.py:7 step.LIMIT",
        "ckpt_prune/job/step.py:7 Gone.act",
        "ckpt_prune/job/README.md:0 store.py",
        "ckpt_prune/job/README.md:1 act_thrice",
    ]
