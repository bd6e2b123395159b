"""Tasks of GLUE (Wang et al. 2019): labelled texts by name, with their metrics."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckpt_prune.datasets.files import find_data_file

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
_REPO = "nyu-mll/glue"


@dataclass(frozen=True)
class LabelTask:
    """Columns, metrics and file of a task of labelled texts.

    Attributes:
        columns: of a row: one text, or two that belong together; empty if the rows themselves tell.
        metrics: of GLUE's leaderboard; empty if the model's head decides.
        classes: names of the labels from 0; empty for labels that are numbers or unknown.
        folder, split: of its file on the Hub.
    """

    columns: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    classes: tuple[str, ...] = ()
    folder: str = ""
    split: str = "validation"


_ENTAILED = ("entailment", "not_entailment")
_INFERENCE = LabelTask(
    ("premise", "hypothesis"), ("accuracy",), ("entailment", "neutral", "contradiction"), "mnli", "validation_matched"
)
GLUE: dict[str, LabelTask] = {
    "cola": LabelTask(("sentence",), ("matthews",), ("unacceptable", "acceptable"), "cola"),
    "sst2": LabelTask(("sentence",), ("accuracy",), ("negative", "positive"), "sst2"),
    "mrpc": LabelTask(("sentence1", "sentence2"), ("accuracy", "f1"), ("not_equivalent", "equivalent"), "mrpc"),
    "qqp": LabelTask(("question1", "question2"), ("accuracy", "f1"), ("not_duplicate", "duplicate"), "qqp"),
    "stsb": LabelTask(("sentence1", "sentence2"), ("pearson", "spearman"), (), "stsb"),
    "mnli": _INFERENCE,
    "mnli-mm": replace(_INFERENCE, split="validation_mismatched"),
    "qnli": LabelTask(("question", "sentence"), ("accuracy",), _ENTAILED, "qnli"),
    "rte": LabelTask(("sentence1", "sentence2"), ("accuracy",), _ENTAILED, "rte"),
    "wnli": LabelTask(("sentence1", "sentence2"), ("accuracy",), ("not_entailment", "entailment"), "wnli"),
}
"""The tasks of GLUE, on splits whose labels are public (those of its test splits are not)."""
_NAME = re.compile(rf"glue:({'|'.join(GLUE)})")


@dataclass(frozen=True)
class NamedTask:
    """A task of GLUE, and perhaps the folder that holds a local copy."""

    name: str
    folder: Path | None = None

    @property
    def task(self) -> LabelTask:
        """Its columns, metrics and file."""
        return GLUE[self.name]

    def file(self) -> Path:
        """Find its file: a local copy, or else the Hub's."""
        option = Path(f"glue:{self.name}") if self.folder is None else self.folder / f"glue:{self.name}"
        inside, split = self.task.folder, self.task.split
        local = (f"{self.name}.jsonl", f"{inside}/{split}.jsonl", f"{inside}/{split}-*.parquet")
        remote = f"{inside}/{split}-00000-of-00001.parquet"
        return find_data_file(option, self.folder, "glue", local, repo=_REPO, remote=remote)


def parse_task_name(given: str) -> NamedTask | None:
    """Parse glue:NAME or FOLDER/glue:NAME; None for anything else."""
    path = Path(given)
    match = _NAME.fullmatch(path.name)
    return None if match is None else NamedTask(match[1], None if path == Path(path.name) else path.parent)


def guess_task(file: Path) -> LabelTask:
    """Return the task that a file's name begins with, as in mrpc.jsonl or mrpc-dev.jsonl; else an empty one."""
    names = sorted((name for name in GLUE if re.match(rf"{name}(?![a-z0-9])", file.stem)), key=len)
    return GLUE[names[-1]] if names else LabelTask()
