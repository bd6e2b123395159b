"""The PyTorch model that a graph is held against: float32, on the CPU."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ckpt_prune.errors import UserError
from ckpt_prune.export.session import complete
from ckpt_prune.export.tasks import PRESENT, Task, without_head


class Reference:
    """A model that is run on what a graph is run on.

    Args:
        model: loaded.
        task: of the graph.
        inputs: names of the graph's inputs: the model is given those of them that its forward knows.

    Attributes:
        model: as it was loaded, with its head.
        module: what does the task.
    """

    def __init__(self, model: PreTrainedModel, task: Task, inputs: set[str]) -> None:
        self.model = model
        self.module = without_head(model, task)
        self._takes = set(inspect.signature(self.module.forward).parameters)
        self._inputs = inputs & self._takes

    def run(self, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every tensor that it returns for whole texts or images, by name; no cache is made.

        Raises:
            UserError: PyTorch itself fails, or returns nothing that has a name.
        """
        output = self._call(feed, {"use_cache": False})
        found = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if not found:
            raise UserError(f"{type(self.module).__name__} returns no tensors with names: there is nothing to compare")
        return found

    def cache(self, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        """The keys and values it keeps of whole texts: `present.i.key`, `present.i.value`, (B, heads, T, head_dim).

        Those of every token, also where attention looks at a window only, as a graph has them.
        """
        kept = DynamicCache()
        self._call(feed, {"use_cache": True, "past_key_values": kept})
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(kept.layers):
            found |= {f"{PRESENT}{index}.key": layer.keys, f"{PRESENT}{index}.value": layer.values}
        return found

    def generate(self, ids: Tensor, mask: Tensor, steps: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Take the likeliest token, step by step, with the model's own cache.

        Args:
            ids: int64 (B, T), padded on the left.
            mask: int64 (B, T), 0 where a token is padding.
            steps: how many.

        Yields:
            What each step is fed, without the cache: new tokens, the whole mask, positions; and the logits of the
            step's last token, (B, vocabulary).
        """
        past: Any = None
        for _ in range(steps):
            feed = complete({"input_ids": ids, "attention_mask": mask})
            output = self._call(feed, {"use_cache": True, "past_key_values": past})
            past = output.past_key_values
            last = output.logits[:, -1]
            yield feed, last
            ids = last.argmax(-1, keepdim=True)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)

    @torch.inference_mode()
    def _call(self, feed: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """The model's output for what of the feed the graph has inputs for, and options that its forward knows."""
        given = {name: value for name, value in feed.items() if name in self._inputs}
        known = {name: value for name, value in options.items() if name in self._takes}
        try:
            return self.module(**given, **known)
        except Exception as error:  # model code raises anything
            shape = " x ".join(map(str, next(iter(feed.values())).shape))
            reason = " ".join(str(error).split())
            raise UserError(
                f"PyTorch itself cannot run {type(self.module).__name__} on {shape}: {reason[:300]}"
            ) from error
