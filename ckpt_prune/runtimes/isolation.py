"""Running a runtime in a process of its own, which it may end or leave threads in."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ckpt_prune.common.child_process import python_command, safe_environment
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.memory import peak_bytes
from ckpt_prune.runtimes.task import RuntimeAnswer, RuntimeTask

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_isolated(runtime: str, task: RuntimeTask) -> RuntimeAnswer:
    """Do a task in a new process, and return what it computed.

    Raises:
        UserError: the runtime cannot load the folder, or ended; its own message is passed on.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt_prune-") as name:
        place = Path(name)
        values = asdict(task) | {"windows": task.windows.tolist(), "folder": str(Path(task.folder).absolute())}
        (place / "task.json").write_text(json.dumps(values), encoding="utf-8")
        environment = _ENVIRONMENT | safe_environment() | {"OMP_NUM_THREADS": str(task.threads)}
        ended = subprocess.run(
            python_command("ckpt_prune.runtimes.isolation", runtime, str(place)),
            env=environment,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        answer = place / "answer.npz"
        if not answer.is_file():
            lines = ended.stdout.decode("utf-8", "replace").strip().splitlines() or [f"exit code {ended.returncode}"]
            raise UserError(f"{runtime} does not run {task.folder}: {lines[-1]}")
        with np.load(answer) as arrays:
            read, generated, memory = arrays["figures"].tolist()
            tokens = json.loads(str(arrays["tokens"]))
            return RuntimeAnswer(arrays["logs"], read, generated, int(memory), tokens)


def _main(runtime: str, place: Path) -> None:
    values = json.loads((place / "task.json").read_text(encoding="utf-8"))
    task = RuntimeTask(**values | {"windows": np.array(values["windows"], np.int64)})
    answer = importlib.import_module(f"ckpt_prune.runtimes.in_{runtime.replace('.', '_')}").run(task)
    figures = np.array([answer.read, answer.generated, answer.memory or peak_bytes() or 0])
    np.savez(place / "partial.npz", logs=answer.logs, figures=figures, tokens=json.dumps(answer.tokens))
    (place / "partial.npz").rename(place / "answer.npz")
    sys.stdout.flush()
    os._exit(0)  # a runtime's threads need not end in order


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
