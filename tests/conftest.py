"""Fixtures and options of all tests: a folder for each test, checkpoints made once, quick and thorough runs."""

import ast
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.stored import Sources

# The process that only hands tests to workers reads this file too. It imports neither torch nor transformers, so that
# the workers start some seconds earlier.
ROOT = Path(__file__).resolve().parents[1]
DEAR = {"click", "multiprocessing", "onnx", "onnxruntime", "subprocess", "transformers"}
"""What runs commands, processes, graphs and whole models. `--quick` runs the files that import none of it."""

FIRST = (
    "onnx_graphs/test_card.py",  # makes most graphs, so that nobody waits for one later
    "cli/test_pair_graphs.py",  # in thorough runs, as contract/test_graphs.py
    "model/discovery/test_sweep.py",
    "runner/test_graph_frontier.py",
    "gguf_files/test_families.py",
    "faults/test_faults.py",
    "cli/test_pairs.py",
    "gguf_files/test_different_blocks.py",
    "runner/test_frontier.py",
    "contract/test_graphs.py",
    "model/discovery/test_discovery.py",
    "cli/test_refusals.py",
    "cli/test_hybrids.py",
    "gguf_files/test_types.py",
    "gguf_files/test_encoders.py",
    "test_guides.py",
    "contract/test_pruning.py",
    "gguf_files/test_keys.py",
    "gguf_files/test_source.py",
    "measure/test_images_with_text.py",
    "gguf_files/test_fitting.py",
    "measure/test_pairs.py",
    "cli/test_stages.py",
    "onnx_graphs/test_families.py",
    "onnx_graphs/test_repetition.py",
    "contract/test_depth.py",
    "gguf_files/test_special_tokens.py",
    "gguf_files/test_commands.py",
    "cli/test_export.py",
    "stages/vocabulary/test_commands.py",
    "stages/test_steps_resumed.py",
    "model/containers/test_remote.py",
    "runner/test_checkpoint_frontier.py",
    "stages/depth/test_commands.py",
    "cli/test_stage_pairs.py",
    "model/test_published.py",
    "test_wheel.py",
    "test_imports.py",
    "test_documents.py",
    "test_examples.py",
    "test_pointers.py",
)
"""The files that take longest run first, so that no worker waits long for another at the end."""

THOROUGH = {line for line in (ROOT / "tests" / "thorough.txt").read_text().splitlines() if not line.startswith("#")}
"""FILE::TEST of the tests that `--thorough` alone runs. Cells of products that it alone runs: `tests/pairs.py`."""

MANY = 200_000
"""Objects that the garbage collector goes through in a tenth of a second."""

SUMMARY = pytest.StashKey[str]()

MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30
"""A file system in memory on Linux, and the bytes that must be free there: a run needs some hundred MiB at a time."""

# Tests write a hundred thousand small files. On a disk that takes a tenth of their time. Workers and the processes that
# tests start use the same folder.
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# A shell ignores Ctrl-C for jobs in the background; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Identities show a mistake in the first few examples, and there are a hundred identities. No example has a deadline:
# time says nothing about the code on a machine that does other work too.
for profile, examples in (("suite", 10), ("thorough", 25)):
    hypothesis.settings.register_profile(
        profile,
        hypothesis.settings(),
        max_examples=examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("suite")

# The Hub's client reads these when it is imported. It waits for an answer as long as a loaded machine needs.
os.environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "86400", "HF_HUB_ETAG_TIMEOUT": "86400"}

# Processes that tests start import this checkout, whatever their working folder is.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only files that run no command, process, graph or model")
    parser.addoption("--thorough", action="store_true", help="every cell of every product (tests/pairs.py)")
    parser.addoption("--threads", type=int, default=1, help="threads of torch in each worker")
    parser.addoption("--other-sums", action="store_true", help="products that add up in other orders")


def pytest_configure(config: pytest.Config) -> None:
    """Take more examples of every identity in a thorough run, before the tests are imported."""
    if config.getoption("--thorough"):
        hypothesis.settings.load_profile("thorough")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Other files are not even imported, nor what prepares whole rooms of them."""
    path = collection_path
    if path.is_dir() and not any(path.glob("*/test_*.py")):
        path /= "conftest.py"
    if not config.getoption("--quick") or not path.match("*.py") or not path.is_file():
        return None
    return True if is_dear(path) else None


@cache
def is_dear(path: Path) -> bool:
    """Return whether a file of tests imports what takes long: by itself, by helpers here or by its room's conftest."""
    names = set(find_imports(path))
    if not names.isdisjoint(DEAR) or path == Path(__file__):
        return path != Path(__file__)
    helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
    return any(is_dear(helper) for helper in (*helpers, path.with_name("conftest.py")) if helper.exists())


def find_imports(path: Path) -> Iterator[str]:
    """Yield top packages that a file imports, and modules of these tests by their full names."""
    room = ".".join(path.parent.relative_to(ROOT).parts)
    statements: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.expr):  # holds no import, and most nodes are of this kind
            continue
        statements += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{room.rsplit('.', node.level - 1)[0]}.{module}".rstrip(".")
            yield module if module.startswith("tests") else module.partition(".")[0]
            yield from (f"{module}.{alias.name}" for alias in node.names if module.startswith("tests"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let every second worker import files from the last on: then each rewrites the assertions of half of them."""
    worker, config = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), session.config
    is_whole = [Path(each).resolve() for each in config.args] == [ROOT / "tests"] and not config.getoption("--quick")
    if not is_whole or int(worker.removeprefix("gw")) % 2 == 0:
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"), reverse=True)
    for path in (each for each in files if each.with_name("__init__.py").exists()):
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and says so
            import_module(".".join(path.relative_to(ROOT / "tests").with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the thorough cells, and put the files that take longest first."""
    if not config.getoption("--thorough"):
        deselected = [item for item in items if is_thorough(item)]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not is_thorough(item)]
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def is_thorough(item: pytest.Item) -> bool:
    """Return whether a test or cell is for thorough runs alone."""
    name = item.nodeid.partition("[")[0].removeprefix("tests/")
    return name in THOROUGH or item.get_closest_marker("thorough") is not None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector away from what is imported."""
    import torch

    torch.set_num_threads(session.config.getoption("--threads"))
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Count what passed, and what was skipped by its reason."""
    if config.option.collectonly:
        return
    counts = Counter(
        report.longrepr[2].removeprefix("Skipped: ").removeprefix("could not import ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    reasons = "; ".join(f"{reason}: {count}" for reason, count in counts.most_common())
    passed = len(terminalreporter.stats.get("passed", ()))
    config.stash[SUMMARY] = f"{passed} tests passed" + (f", {counts.total()} skipped. {reasons}" if counts else "")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the counts as the last line, behind what pytest says itself."""
    if SUMMARY in config.stash:
        print(config.stash[SUMMARY])


@pytest.fixture(autouse=True, scope="session")
def other_sums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let products add up in other orders where that is asked for."""
    if not request.config.getoption("--other-sums"):
        yield
        return
    from tests.other_sums import OtherSums

    with OtherSums():
        yield


@pytest.fixture(autouse=True, scope="session")
def skip_fsync() -> Iterator[None]:
    """Never wait until a file is on disk: a prune does so some twenty times, in case of a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def fix_machine() -> Iterator[None]:
    """Let estimates of time and memory be those of one machine, slow in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_prune.parallel.devices.time_products", lambda: (1.0, 4.0))
        patch.setattr("ckpt_prune.runner.estimate.time_run", lambda *_: 0.001)
        patch.setattr("ckpt_prune.runner.estimate.time_solve", lambda *_: 0.01)
        patch.setattr("ckpt_prune.runner.estimate._time_head", lambda *_: 0.0001)
        patch.setattr("ckpt_prune.runner.estimate.elapsed_seconds", lambda: 0.0)
        patch.setattr("ckpt_prune.runner.estimate.resident_bytes", lambda: 2**30)
        patch.setattr("ckpt_prune.runner.estimate.available_bytes", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def stop_clock() -> Iterator[None]:
    """Print no line that appears only after some time; tests of those lines set the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_prune.common.progress.now", lambda: 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def skip_comparison() -> Iterator[None]:
    """Skip the comparison of a model with transformers: one test does it for every family."""
    from ckpt_prune.verification import forward_pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_pass, "_check", lambda model, samples, say: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """Keep results in a folder of the run's own, and not in the user's: all workers describe a class once."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
        yield


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Keep the garbage collector away from what earlier files left: an export looks for garbage each time.

    Skeletons that are kept are millions of objects in the end, which take seconds to go through.
    """
    if len(gc.get_objects()) > MANY:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def skip_count() -> Iterator[None]:
    """Say at once that objects are frozen, as they are here: Python counts millions of them anew each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def keep_skeletons() -> Iterator[None]:
    """Keep names and shapes of every tiny model: a file goes through all families for one promise after another.

    And keep transformers quiet from the start, which this package does and undoes thousands of times.
    """
    from transformers.utils import logging

    from ckpt_prune.model import skeleton

    logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeleton, "_stock_names", cache(skeleton._stock_names.__wrapped__))
        yield


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path) -> Iterator[Path]:
    """The working folder: one of the test's own, without anything in it.

    Not by `monkeypatch`, whose `undo` a test may call.
    """
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> "Sources":
    """Dense checkpoints of the language models' variants, and their statistics, each made once."""
    from tests.families import calibrate, make
    from tests.stored import Sources

    def measure(variant, folder, out, **options):
        return calibrate(folder, out, **options)

    return Sources(tmp_path_factory.mktemp("sources"), make, measure)


@pytest.fixture
def any_tokenizer(monkeypatch):
    """Tiny models have tokenizers of whole words, which llama.cpp has not: let their files have none."""
    from ckpt_prune.gguf.tokenizer import FileTokenizer

    none = FileTokenizer({}, "none", (), ())
    monkeypatch.setattr("ckpt_prune.gguf.file_plan.read_tokenizer", lambda *_, **__: none)
