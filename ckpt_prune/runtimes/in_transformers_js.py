"""transformers.js in Node, with the graph that `export` wrote."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ckpt_prune.runtimes.task import RuntimeAnswer, RuntimeTask, log_softmax


def run(task: RuntimeTask) -> RuntimeAnswer:
    with tempfile.TemporaryDirectory(prefix="ckpt_prune-") as name:
        place = Path(name)
        (place / "task.json").write_text(json.dumps(asdict(task) | {"windows": task.windows.tolist()}))
        ended = subprocess.run(["node", str(Path(__file__).with_suffix(".cjs")), name], check=False)
        if ended.returncode:
            sys.exit(ended.returncode)  # its last line is the reason
        figures = json.loads((place / "figures.json").read_text())
        logits = np.fromfile(place / "logits.bin", np.float32)
    windows, length = task.windows.shape
    first, all_of_them = figures["seconds"]
    return RuntimeAnswer(
        log_softmax(logits.reshape(windows, len(task.positions), -1)),
        (length - task.generate) / first,
        (task.generate - 1) / max(all_of_them - first, 1e-9),
        figures["memory"],
        figures["tokens"],
    )
