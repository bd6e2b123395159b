"""What a graph is for: its inputs and outputs follow from it."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import MODEL_MAPPING

from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.classification import is_vision
from ckpt_prune.evaluation.loading import kind_of
from ckpt_prune.planning.export_recipe import AskedTask, TaskName

PAST, PRESENT = "past_key_values.", "present."
"""Keys and values of earlier tokens go in as `past_key_values.i.key` and `.value`, and come out as `present.i.…`."""

_TASKS: dict[str, TaskName] = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForPreTraining": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModel": "feature-extraction",
}
"""Auto class of a checkpoint → task."""


@dataclass(frozen=True)
class Task:
    """What a graph is for."""

    name: TaskName
    modality: Literal["text", "image"]
    """What it reads."""
    cached: bool
    """Whether keys and values of earlier tokens go in and out."""


def chosen_task(config: dict[str, Any], *, task: AskedTask = "auto", cache: bool | None = None) -> Task:
    """The task of an export.

    Args:
        config: config.json of the checkpoint.
        task: what is asked for; auto is what the checkpoint's own class does.
        cache: keys and values of earlier tokens as inputs and outputs; None where text is generated.

    Raises:
        UserError: a head that the checkpoint does not have, or a cache where nothing is generated.
    """
    auto = kind_of(config)
    own = _TASKS.get(auto)
    if own is None:
        raise UserError(f"a model of class {auto} cannot be exported: known are {', '.join(_TASKS)}")
    if task not in ("auto", own, "feature-extraction"):
        more = "" if own == "feature-extraction" else " or feature-extraction"
        raise UserError(f"this model has no head for {task}: it can be exported for {own}{more}")
    name = own if task == "auto" else task
    if cache and name != "text-generation":
        raise UserError(f"a graph for {name} has no keys and values to keep: leave out --cache")
    return Task(name, "image" if is_vision(config) else "text", name == "text-generation" and cache is not False)


def without_head(model: Any, task: Task) -> Any:
    """The module that does the task: the model, or its base where the task is feature-extraction."""
    base = MODEL_MAPPING.get(type(model.config), None)
    # A base model may call a module of its own by the name that classes with a head give the base model.
    if task.name != "feature-extraction" or (base is not None and isinstance(model, base)):
        return model
    return model.base_model
