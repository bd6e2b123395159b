"""Commands on changed files, in copies of this process, and what must hold whatever is in a file."""

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ckpt_prune.cli.guard import DEBUG
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.runtimes import in_transformers, proof
from ckpt_prune.runtimes.task import RuntimeAnswer, RuntimeTask
from tests.cli.running import listing
from tests.forked import begin
from tests.fuzz.mutate import CANARY, mutate_data
from tests.fuzz.targets import TARGETS

SECONDS = 20
"""Of the processor, the longest that a command may take."""
MOST = 2**31
"""Bytes of memory that it may take beside what the process has."""
WORDS = (
    "what reaches",
    "model_type",
    "the recipe",
    "the plan",
    "the text",
    "the tokenizer",
    "the model's context",
    "calibration data",
)
"""What stands for the one file of its kind that a command is given."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
_OWN_CODE = {name: (files("ckpt_prune") / name).read_bytes() for name in ("modeling_pruned.py", "mlx_pruned.py")}
_COPIES = "transformers_modules"
"""In the paths to which transformers copies the code of a folder before it runs it."""
_FORBIDDEN = ("pickle.find_class", "socket.connect", "os.system", "os.exec", "os.posix_spawn")


class _HungError(BaseException):
    """It took too long."""


@dataclass(frozen=True)
class Failure:
    """A promise that did not hold for a case."""

    target: str
    number: int
    command: str
    what: str


def batch(place: Path, target: str, seed: int, first: int, count: int, *, waited: int | None = None) -> list[Failure]:
    """Try cases of a target in a copy of this process.

    Args:
        place: as `make_place` wrote it; it is as it was afterwards.
        target: of TARGETS.
        seed: of the changes.
        first: number of the first case.
        count: of cases.
        waited: seconds on the clock that a command may take, for campaigns that look for what hangs.
    """
    log = place.parent / f"told-{target.replace(' ', '-')}"
    log.write_text("")
    original = (place / TARGETS[target].file).read_bytes()
    failures: list[Failure] = []
    while first >= 0 and count > 0:
        end = first + count
        child = begin(partial(_work, place, target, seed, first, end, log, waited), place.parent)
        try:
            done = child.ended(None if waited is None else 3 * waited + 60 * count)
            code = f"the process ended with {done.returncode}"
        except TimeoutError:
            code = "the process hung"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        log.write_text("")
        failures += [Failure(**line["failure"]) for line in lines if "failure" in line]
        (place / TARGETS[target].file).write_bytes(original)
        reached = [line["case"] for line in lines if "case" in line]
        last, command = (reached or [(first, "")])[-1]
        if lines and "done" in lines[-1]:
            break
        failures.append(Failure(target, last, command, code))
        first, count = last + 1, end - last - 1
    return failures


def case_bytes(place: Path, target: str, seed: int, number: int) -> bytes:
    """The changed file of a case."""
    subject = TARGETS[target]
    return mutate_data((place / subject.file).read_bytes(), subject.kind, random.Random(f"{seed} {target} {number}"))


def _work(place: Path, target: str, seed: int, first: int, end: int, log: Path, waited: int | None) -> None:
    os.chdir(place)
    tempfile.tempdir = str(place.parent)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MOST
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGALRM, _hung)
    signal.signal(signal.SIGPROF, _hung)
    seen: list[str] = []
    watched = Path.cwd()

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and CANARY in str(given[0]):
            seen.append(f"opens {given[0]}")
        elif event in _FORBIDDEN:
            seen.append(f"{event} {given[:1]}")
        elif event == "compile" and str(watched) in str(given[1]):
            seen.append(f"compiles {given[1]}")
        elif event == "compile" and _COPIES in str(given[1]) and given[0] not in (None, b"", *_OWN_CODE.values()):
            seen.append(f"runs {given[1]}")

    os.environ[DEBUG] = "1"
    sys.dont_write_bytecode = True  # what is run is compiled each time, and seen
    sys.addaudithook(audit)
    vars(proof).update(require_runtime=lambda _runtime: None, run_isolated=partial(_reach, seen))
    subject = TARGETS[target]
    path = Path(subject.file)
    original = path.read_bytes()
    with log.open("a", buffering=1) as file:

        def tell(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")

        for number in range(first, end):
            command = subject.commands[number % len(subject.commands)]
            tell(case=[number, " ".join(command)])
            path.write_bytes(mutate_data(original, subject.kind, random.Random(f"{seed} {target} {number}")))
            before = listing()
            seen.clear()
            for what in [*_faults(command, subject.file, waited), *seen]:
                tell(failure=Failure(target, number, " ".join(command), what).__dict__)
            _clear()
            if listing() != before:
                changed = sorted(k for k in before.keys() | listing().keys() if before.get(k) != listing().get(k))
                tell(failure=Failure(target, number, " ".join(command), f"wrote {changed[:3]}").__dict__)
        path.write_bytes(original)
        tell(done=True)


def _reach(seen: list[str], runtime: str, task: RuntimeTask) -> RuntimeAnswer:
    """Stand in for the process of a runtime, and see what code the runtime would run there."""
    folder = Path(task.folder)
    if runtime == "transformers":
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                return in_transformers.run(task)
        except Exception as error:  # whatever it is, `run_isolated` passes on its last line
            raise UserError(f"{runtime} does not run {task.folder}: {str(error)[:300]!r}") from None
    if runtime == "mlx":
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_file")
        if named is not None and (folder / named).read_bytes() != _OWN_CODE["mlx_pruned.py"]:
            seen.append(f"MLX-LM runs {named}")
    if runtime == "genai":
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        options = json.dumps(config["model"]["decoder"].get("session_options"))
        if config.keys() - {"model", "search"} or "path" in options or "library" in options:
            seen.append(f"onnxruntime-genai reads {sorted(config)} and {options}")
        if not (folder / config["model"]["decoder"]["filename"]).resolve().is_relative_to(folder.resolve()):
            seen.append("onnxruntime-genai leaves the folder")
    raise UserError(f"{runtime} does not run {task.folder}: it is not here")


def _not_json(path: Path) -> list[str]:
    """Names of numbers in a file that JSON does not have: NaN, Infinity."""
    found: list[str] = []
    json.loads(path.read_text(encoding="utf-8"), parse_constant=found.append)
    return found


def _clear() -> None:
    for out in (Path("out"), Path("out.gguf")):
        if out.is_dir():
            shutil.rmtree(out)
        out.unlink(missing_ok=True)


def _hung(*_: object) -> None:
    raise _HungError


def _faults(command: tuple[str, ...], file: str, waited: int | None) -> list[str]:
    began = time.process_time()
    signal.alarm(waited or 0)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        result = CliRunner().invoke(main, command)
    except _HungError:
        return [f"hangs: more than {SECONDS} s of the processor" + (f", or {waited} s" if waited else "")]
    except BaseException as error:  # a panic is no Exception
        return [f"raises {type(error).__name__}: {str(error)[:200]}"]
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    faults = []
    # What is wrong with a file may show in another that it is about.
    given = {Path(argument).parts[0] for argument in command if "/" in argument or Path(argument).exists()} - {"out"}
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        return [f"raises {type(error).__name__} at {at}: {str(error)[:200]}"]
    if result.exit_code not in (0, 1, 2) or (result.exit_code == 1 and command[0] not in ("verify", "validate")):
        faults.append(f"exit code {result.exit_code}")
    if result.exit_code == 2:
        errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        if len(errors) != 1 or result.stderr.splitlines()[-1:] != errors:
            faults.append(f"not one line: {result.stderr[:200]!r}")
        elif not any(name in errors[0] for name in (file, Path(file).name, *given, *WORDS)):
            faults.append(f"does not name the file: {errors[0][:200]!r}")
        elif len(errors[0]) > 2000:
            faults.append(f"a line of {len(errors[0])} characters")
    faults += [f"writes {path} with {name}" for path in Path("out").glob("*.json") for name in _not_json(path)]
    if control := _CONTROLS.search(result.stdout + result.stderr):
        faults.append(f"prints {control[0]!r}")
    if time.process_time() - began > SECONDS:
        faults.append("hangs")
    return faults
