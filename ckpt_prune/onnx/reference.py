"""The PyTorch model that a graph is compared with: float32, on the CPU."""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.memory import return_freed_memory
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.session import complete_inputs
from ckpt_prune.onnx.tasks import PRESENT, GraphTask, remove_head
from ckpt_prune.onnx.tracing import get_cache, make_example


class HeldModel:
    """A WHOLE model that is loaded when it is asked for, and can be let go until it is asked for again."""

    def __init__(self, load: Callable[[], PreTrainedModel]) -> None:
        self._load = load
        self._model: PreTrainedModel | None = None

    def get(self) -> PreTrainedModel:
        if self._model is None:
            self._model = self._load()
        return self._model

    def let_go(self) -> None:
        """Free its memory, also if somebody still holds the model itself."""
        if self._model is not None:
            drop_weights(self._model)
            self._model = None
            return_freed_memory()


def drop_weights(model: PreTrainedModel) -> None:
    """Free a model's parameters, whoever still holds it."""
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)


class GraphReference:
    """A model that is run on what a graph is run on.

    It is loaded where `model` or `module` is asked for, or it is run, and can be let go between.

    Args:
        inputs: names of the graph's inputs: the model is given those of them that its forward knows, and all that a
            graph of it is traced with, whether or not this graph has kept it.

    Attributes:
        config: of the model.
        needs: inputs that a graph of it is traced with, keys and values apart.
    """

    def __init__(self, held: HeldModel, task: GraphTask, inputs: set[str]) -> None:
        self._held, self._task = held, task
        self.config: Any = self.model.config
        self._prepare(inputs)

    def _prepare(self, inputs: set[str]) -> None:
        module = self.module
        self._text_config: Any = module.config.get_text_config()
        self._parameters = set(inspect.signature(module.forward).parameters)
        self._past: Any = cache_argument(module.forward)
        example = make_example(module, self._task)
        self.needs: list[str] = [name for name, value in example.inputs.items() if isinstance(value, Tensor)]
        self._inputs = {*self.needs, *(inputs & self._parameters)}

    @property
    def model(self) -> PreTrainedModel:
        """The model with its head."""
        return self._held.get()

    @property
    def module(self) -> Any:
        """The model, or its base for feature-extraction."""
        return remove_head(self.model, self._task)

    def let_go(self) -> None:
        """Free the model's memory until it is asked for again."""
        self._held.let_go()

    def with_model(self, model: Any) -> "GraphReference":
        """Return the same with another model, which is called like it, in its place."""
        other = copy(self)
        other._held = HeldModel(lambda: model)
        return other

    @property
    def segments(self) -> int:
        """How many values `token_type_ids` may have; 0 if the model takes none, or does not say."""
        if "token_type_ids" not in self.needs:
            return 0
        return getattr(self._text_config, "type_vocab_size", None) or 0

    def depends_on(self, name: str) -> bool:
        """Whether its output depends on one of `needs`, found by changing it: tracing drops what does not matter."""
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "attention_mask": _mask_start,
            "position_ids": lambda value: value.flip(1),  # not a shift, which relative positions do not notice
            "token_type_ids": torch.ones_like,
        }
        if name not in changes:
            return True
        if name == "token_type_ids" and self.segments < 2:
            return False  # it can only be zero
        ids = torch.arange(6).view(2, 3) % self._text_config.vocab_size
        feed = complete_inputs({"input_ids": ids})
        before, after = self.run(feed), self.run(feed | {name: changes[name](feed[name])})
        return any(not torch.equal(value, after[key]) for key, value in before.items())

    def run(self, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return every tensor that it returns for whole texts or images, by name; no cache is made."""
        return self._tensors(self._call(feed, {"use_cache": False}))

    def run_with_cache(self, feed: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return every tensor that it returns for whole texts, and the keys and values that it keeps of them.

        Those are `present.i.key` and `present.i.value`, (B, heads, T, head_dim), of every token, also where attention
        looks at a window only, as a graph has them.
        """
        cache = DynamicCache()
        tensors = self._tensors(self._call(feed, {"use_cache": True, self._past: cache}))
        kept: dict[str, Tensor] = {}
        for index, layer in enumerate(cache.layers):
            kept |= {f"{PRESENT}{index}.key": layer.keys, f"{PRESENT}{index}.value": layer.values}
        return tensors, kept

    def _tensors(self, output: Any) -> dict[str, Tensor]:
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if not tensors:
            raise UserError(f"{type(self.module).__name__} returns no tensors with names: there is nothing to compare")
        return tensors

    def generate(self, ids: Tensor, mask: Tensor, steps: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Take the likeliest token, step by step, with the model's own cache.

        Args:
            ids: int64 (B, T), padded on the left.
            mask: int64 (B, T), 0 where a token is padding.

        Yields:
            The inputs of each step, without the cache: new tokens, the whole mask, positions; and the logits of the
            step's last token, (B, vocabulary).
        """
        past: Any = None
        for _ in range(steps):
            feed = complete_inputs({"input_ids": ids, "attention_mask": mask})
            output = self._call(feed, {"use_cache": True, self._past: past})
            past = get_cache(output)
            last = output.logits[:, -1]
            yield feed, last
            ids = last.argmax(-1, keepdim=True)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)

    @torch.inference_mode()
    def _call(self, feed: dict[str, Tensor], options: dict[str, Any]) -> Any:
        inputs = {name: value for name, value in feed.items() if name in self._inputs}
        options = {name: value for name, value in options.items() if name in self._parameters}
        return self.run_module(lambda module: module(**inputs, **options), feed)

    def run_module(self, run: Callable[[Any], Any], feed: dict[str, Tensor]) -> Any:
        """Return what a call of the module gives, which says on what shape it fails."""
        module = self.module
        try:
            return run(module)
        except Exception as error:  # model code raises anything
            shape = " x ".join(map(str, next(iter(feed.values())).shape))
            name = type(module).__name__
            raise UserError(f"PyTorch itself cannot run {name} on {shape}: {one_line(error)}") from error


def _mask_start(mask: Tensor) -> Tensor:
    """Return all but the last token of the last text as padding: causal attention, too, looks back at it."""
    changed = mask.clone()
    changed[-1, :-1] = 0
    return changed
