"""Tasks of graphs: inputs and outputs follow from them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from transformers import CONFIG_MAPPING

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GraphStack
from ckpt_prune.evaluation.image_classes import is_vision
from ckpt_prune.evaluation.whole_model import auto_class, purpose_of, reads_causally
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import size_of_blank
from ckpt_prune.model.purposes import Purpose
from ckpt_prune.model.skeleton import base_model_of, parse_config
from ckpt_prune.onnx.stacks import DecoderStep
from ckpt_prune.options.graphs import AskedTask, TaskName

PAST, PRESENT = "past_key_values.", "present."
"""Keys and values of earlier tokens go in as `past_key_values.i.key` and `.value`, and come out as `present.i.…`.
Behind an encoder they are `past_key_values.i.decoder.key` of the target, and `past_key_values.i.encoder.key` of the
encoder's states."""
Modality = Literal["text", "image", "pairs"]
_OF_PAIRS: tuple[TaskName, ...] = ("text2text-generation", "automatic-speech-recognition")
_TASKS: dict[Purpose, TaskName] = {"sentence-similarity": "feature-extraction", "text-ranking": "text-generation"}
"""Purpose → the task of its graph, if that has another name."""


@dataclass(frozen=True)
class GraphTask:
    """The task and inputs of a graph, or of the two graphs of an encoder-decoder.

    Attributes:
        cached: keys and values of earlier tokens go in and out.
        stack: of which one graph is; None: of the model as a whole, or both.
        image: height and width of the images that a graph reads, if it is known from elsewhere than config.json.
    """

    name: TaskName
    modality: Modality
    cached: bool
    stack: GraphStack | None = None
    image: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def graphs(self) -> "tuple[GraphTask, ...]":
        """The task of each graph that the model becomes."""
        if self.modality != "pairs":
            return (self,)
        return replace(self, cached=False, stack="encoder"), replace(self, stack="decoder")


def choose_task(
    config: dict[str, Any], *, folder: Path | None = None, task: AskedTask = "auto", cache: bool | None = None
) -> GraphTask:
    """Return the task of an export.

    Args:
        config: config.json of the checkpoint.
        folder: of the checkpoint; without it, config.json alone says what the checkpoint is for.
        task: auto for what the checkpoint is for.
        cache: keys and values of earlier tokens as inputs and outputs; None: if text is generated.
    """
    purpose = purpose_of(config, folder)
    if purpose is None or _TASKS.get(purpose, purpose) not in get_args(TaskName):
        tasks = ", ".join(get_args(TaskName))
        raise UserError(f"a model of class {auto_class(config)} cannot be exported: there are graphs for {tasks}")
    # Rerankers by logits read a pair of texts once: there is nothing to keep.
    cache = False if purpose == "text-ranking" and cache is None else cache
    own_task = _TASKS.get(purpose) or cast(TaskName, purpose)
    if task not in ("auto", own_task, "feature-extraction"):
        more = "" if own_task == "feature-extraction" else " or feature-extraction"
        why = f"is for {purpose}, not for" if purpose in _TASKS else "has no head for"
        raise UserError(f"this model {why} {task}: it can be exported for {own_task}{more}")
    if own_task in _OF_PAIRS and task == "feature-extraction":
        raise UserError(f"this model is for {own_task}: it becomes two graphs, of its encoder and of its decoder")
    name = own_task if task == "auto" else task
    if name in _OF_PAIRS:
        if cache is False:
            raise UserError(f"a decoder's graph for {name} keeps keys and values: leave out --no-cache")
        _check_sounds(config)
        return GraphTask(name, "pairs", True)
    if cache and name != "text-generation":
        raise UserError(f"a graph for {name} has no keys and values to keep: leave out --cache")
    if is_vision(config):
        return GraphTask(name, "image", False, image=None if folder is None else _read_image_size(config, folder))
    return GraphTask(name, "text", name == "text-generation" and cache is not False)


def _read_image_size(config: dict[str, Any], folder: Path) -> tuple[int, int] | None:
    """Return the size that the image processor makes, of a class that reads any: its config has no say in it.

    None where the class has a size of its own, or the folder no processor that makes one.
    """
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING or hasattr(CONFIG_MAPPING[model_type](), "image_size"):
        return None
    try:
        return size_of_blank(load_processor(folder))
    except UserError:
        return None


def _check_sounds(config: dict[str, Any]) -> None:
    """Refuse a model that hears sounds of any length: Whisper's features have the shape that its config says."""
    if purpose_of(config) == "automatic-speech-recognition" and not {"num_mel_bins", "max_source_positions"} <= set(
        parse_config(config).to_dict()
    ):
        raise UserError(f"{config.get('model_type')} reads sounds of any length: only Whisper's are exported")


def check_padding(config: dict[str, Any], task: GraphTask) -> None:
    """Refuse a causal classifier without a padding token: it cannot find the last token of a text in a batch."""
    classifies = task.name == "text-classification" and reads_causally(config)
    if classifies and parse_config(config).pad_token_id is None:
        raise UserError(
            "config.json has no pad_token_id, by which the class knows the last token of a text, so a graph could not "
            "read several texts at once: write the number of the tokenizer's padding token there"
        )


def remove_head(model: Any, task: GraphTask) -> Any:
    """Return the module that does the task: the model, its base for feature-extraction, or one of its stacks."""
    if task.stack is not None:
        return model.get_encoder() if task.stack == "encoder" else DecoderStep(model)
    return model if task.name != "feature-extraction" else base_model_of(model)
