"""The tasks that a paper's tables have a mean of, and whether plain or normalised accuracy is in them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.datasets.files import DATA_VARIABLE

PLAIN, NORM = "accuracy", "accuracy_norm"
_LM_EVAL = {PLAIN: "acc,none", NORM: "acc_norm,none"}
"""Their names in the tables of lm-eval."""
_SEVEN = {
    **{"boolq": PLAIN, "piqa": PLAIN, "hellaswag": NORM, "winogrande": PLAIN},
    **{"arc_easy": NORM, "arc_challenge": NORM, "openbookqa": NORM},
}
SUITES: Mapping[str, Mapping[str, str]] = {
    "rcpu": _SEVEN,
    "laco": {"boolq": PLAIN, "piqa": PLAIN, "rte": PLAIN, **_SEVEN},
    "denoise": {"piqa": NORM, "winogrande": PLAIN, "hellaswag": NORM, "arc_easy": NORM, "arc_challenge": NORM},
}
"""Suite → task of lm-eval → which accuracy. The papers do not say which: these give their dense models' figures (RCPU's
LLaMA-7B has 72.85 on ARC-easy, which is normalised, and 78.67 on PIQA, which is not)."""
_NAME = re.compile(r"suite:(.+)")


@dataclass(frozen=True)
class NamedSuite:
    """A suite, and the folder that was given before its name.

    Attributes:
        tasks: task → which accuracy counts.
    """

    name: str
    folder: Path | None

    @property
    def tasks(self) -> Mapping[str, str]:
        return SUITES[self.name]

    def files(self) -> dict[str, Path]:
        """Return task → its file of items, TASK*.jsonl, in the folder or $CKPT_PRUNE_DATA/tasks; empty without one."""
        data = os.environ.get(DATA_VARIABLE)
        folder = self.folder or (Path(data) / "tasks" if data else None)
        if folder is None or not folder.is_dir():
            if self.folder is not None:
                raise UserError(f"{folder}: no such folder of files of items")
            return {}
        files = {task: sorted(folder.glob(f"{task}*.jsonl")) for task in self.tasks}
        if self.folder is not None and not any(files.values()):
            raise UserError(f"{folder} has no file of {self.name}'s tasks: {', '.join(f'{t}.jsonl' for t in files)}")
        return {task: paths[0] for task, paths in files.items() if paths}

    def mean(self, scores: Mapping[str, Mapping[str, float]]) -> float | None:
        """Return the mean of the accuracies that count, over the tasks that have one; None if none has.

        `scores` is task → accuracy, by our names or lm-eval's.
        """
        values = [
            accuracies[key]
            for task, metric in self.tasks.items()
            if (accuracies := scores.get(task)) is not None
            for key in (metric, _LM_EVAL[metric])
            if key in accuracies
        ]
        return sum(values) / len(values) if values else None

    def describe(self, scores: Mapping[str, Mapping[str, float]], model: str) -> str:
        """Return the line that tells the mean of a model, and what it is of."""
        mean = self.mean(scores)
        lacking = [task for task in self.tasks if task not in scores]
        of = f"{len(self.tasks) - len(lacking)} of {len(self.tasks)} tasks"
        without = f" (not measured: {', '.join(lacking)})" if lacking else ""
        return f"mean of {self.name}'s {of}, {model}: {'-' if mean is None else f'{mean:.1%}'}{without}"


def parse_suite(given: str) -> NamedSuite | None:
    """Parse suite:NAME or FOLDER/suite:NAME; None for anything else."""
    path = Path(given)
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    if match[1] not in SUITES:
        raise UserError(f"--tasks {given}: no suite {match[1]!r}: {did_you_mean(match[1], SUITES)}{', '.join(SUITES)}")
    return NamedSuite(match[1], None if path == Path(path.name) else path.parent)
