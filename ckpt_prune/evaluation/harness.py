"""The bridge to lm-eval, EleutherAI's evaluation harness: an optional dependency, the `eval` extra."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.extras import install
from ckpt_prune.common.similar_names import did_you_mean
from ckpt_prune.evaluation.results import PlainResult
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.show.section import Table


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    *,
    device: torch.device | str,
    limit: int | None = None,
    include_path: Path | None = None,
    model: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Run lm-eval tasks on a checkpoint folder; the WHOLE model is loaded, as `load_model` does, if it is not given.

    Args:
        folder: with its tokenizer.
        tasks: names of lm-eval tasks or groups.
        device: where the model goes.
        limit: only the first so many examples of each task; None takes all.
        include_path: a folder with task files (YAML) of the user's own.
        model: the folder's, if it is loaded already.

    Returns:
        lm-eval's own tables, ready for JSON: `results` (task → metric → value), `versions` (task → version) and
        `n-samples` (task → examples there are and examples used).
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"tasks need lm-eval ({error}): {install('eval')}") from error
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"{include_path}: no such folder of task files")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of the preloaded model below, which is meant
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    check_tasks(tasks, manager.all_tasks)
    # A loaded model rather than its path: one loader for every folder, ours with unequal widths included.
    loaded, tokenizer = load_model(folder, device=device) if model is None else model, load_tokenizer(folder)
    wrapped = HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=8)
    try:
        outcome = lm_eval.simple_evaluate(
            model=wrapped, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False
        )
    except OSError as error:  # what `datasets` raises for a file, a data set or a Hub that is not there
        raise UserError(f"the data of {', '.join(tasks)} cannot be loaded: {one_line(error)}") from error
    except IndexError as error:
        size = loaded.config.get_text_config().vocab_size
        if len(tokenizer) <= size:
            raise
        raise UserError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens and the model's vocabulary {size}, and a task has "
            "one beyond: the tokenizer belongs to another model"
        ) from error
    return {key: outcome[key] for key in ("results", "versions", "n-samples")}


def check_tasks(tasks: Sequence[str], known: Iterable[str]) -> None:
    """Refuse task names that lm-eval does not know, and suggest the nearest that it does."""
    names = list(known)
    for task in tasks:
        if task not in names:
            hint = did_you_mean(task, names, most=5).rstrip()
            raise UserError(f"unknown task {task!r}: {hint or '`lm_eval ls tasks` lists them'}")


def tabulate(model: Path, tables: dict[str, Any], against: Path | None, others: dict[str, Any] | None) -> PlainResult:
    """Put the tables of `run_tasks` of a model, and of a reference, side by side; standard errors are in JSON alone."""
    rows, differences = [], dict[str, dict[str, float]]()
    for task, metrics in tables["results"].items():
        theirs = {} if others is None else others["results"][task]
        for metric, value in metrics.items():
            if not isinstance(value, float) or "stderr" in metric:
                continue
            rows.append([task, metric, f"{value:.4f}"])
            if metric in theirs:
                differences.setdefault(task, {})[metric] = difference = value - theirs[metric]
                rows[-1] += [f"{theirs[metric]:.4f}", f"{difference:+.4f}"]
            elif others is not None:
                rows[-1] += ["-", "-"]
    if others is None:
        return PlainResult(tables, [Table(["task", "metric", "value"], rows)])
    record = tables | {"against": {"model": str(against)} | others, "differences": differences}
    return PlainResult(record, [Table(["task", "metric", str(model), str(against), "difference"], rows)])
