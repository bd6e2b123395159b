"""What a graph is for: its inputs and outputs follow from it."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from ckpt_prune.errors import UserError
from ckpt_prune.planning.export_recipe import FEATURES, FILL_MASK, IMAGE_CLASSIFICATION, TEXT_GENERATION

_TASKS = {
    "AutoModelForCausalLM": TEXT_GENERATION,
    "AutoModelForMaskedLM": FILL_MASK,
    "AutoModelForPreTraining": FILL_MASK,
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": IMAGE_CLASSIFICATION,
    "AutoModel": FEATURES,
}
"""Auto class of a checkpoint → task."""


@dataclass(frozen=True)
class Task:
    """What a graph is for."""

    name: str
    """One of `planning.export_recipe.TASKS`."""
    modality: Literal["text", "image"]
    """What it reads."""
    cached: bool
    """Whether keys and values of earlier tokens go in and out."""

    @property
    def per_token(self) -> bool:
        """Whether the first output says something of every token, so that padding is left out of comparisons."""
        return self.modality == "text" and self.name != "text-classification"


def chosen_task(auto_class: str, model: PreTrainedModel, *, task: str = "auto", cache: bool | None = None) -> Task:
    """The task of an export.

    Args:
        auto_class: that loads the checkpoint.
        model: loaded.
        task: one of `TASKS`, or auto for that of the checkpoint's own class.
        cache: keys and values of earlier tokens as inputs and outputs; None where the task has them.

    Raises:
        UserError: a head that the checkpoint does not have, or a cache where nothing is generated.
    """
    own = _TASKS.get(auto_class, TEXT_GENERATION)
    if task not in ("auto", own, FEATURES):
        raise UserError(
            f"--task {task}: {type(model).__name__} has no head for it; it can be exported for {own}"
            + (f" or {FEATURES}" if own != FEATURES else "")
        )
    name = own if task == "auto" else task
    if cache and name != TEXT_GENERATION:
        raise UserError(f"--cache: {name} has no keys and values to keep; only {TEXT_GENERATION} has")
    modality: Literal["text", "image"] = "image" if model.main_input_name == "pixel_values" else "text"
    return Task(name, modality, cached=name == TEXT_GENERATION and cache is not False)


def without_head(model: PreTrainedModel, task: Task) -> Any:
    """The module that does the task: the model, or its base where the task is `feature-extraction`."""
    return model.base_model if task.name == FEATURES else model
