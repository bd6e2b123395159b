"""A model and the one it is compared with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.memory import available_bytes
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.device_map import current_device_map
from ckpt_prune.evaluation.perplexity import LanguageModel
from ckpt_prune.evaluation.streamed import StreamedModel, have_room
from ckpt_prune.evaluation.whole_model import default_dtype, load_model

_ROOM = 0.8
"""Share of the free memory that models may take."""


@dataclass(frozen=True)
class Pair:
    """A model, and perhaps a reference.

    Attributes:
        trust: run code that a folder brings.
        graph, reference_graph: their ONNX graphs, if they are graphs; the folders are those that they lie in.
        open_graph: opens a graph as what is called like a model. It belongs to another room.
        tells_noise: where a KL is small, measure how far the reference is from itself in another dtype.
        keeps: hold each model once it is loaded, because several measurements follow.
        foresee: told what will be run block by block on how many windows of how many tokens, before it is. What it
            takes is known in another room.
    """

    folder: Path
    reference: Path | None
    device: torch.device
    trust: bool
    graph: Path | None = None
    reference_graph: Path | None = None
    open_graph: Callable[[Path], PreTrainedModel] | None = None
    tells_noise: bool = False
    keeps: bool = False
    foresee: Callable[[list[StreamedModel], int, int], None] | None = None
    _loaded: dict[Path, PreTrainedModel] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> Path:
        """The model, as results name it."""
        return self.graph or self.folder

    @property
    def reference_name(self) -> Path | None:
        """The reference, as results name it."""
        return self.reference_graph or self.reference

    def names(self) -> dict[str, str | None]:
        """Return both names, as JSON has them."""
        return {
            "model": str(self.name),
            "against": None if self.reference_name is None else str(self.reference_name),
        }

    @property
    def folders(self) -> list[Path]:
        return [self.folder] if self.reference is None else [self.folder, self.reference]

    def load(self) -> PreTrainedModel:
        """Load the WHOLE model. Raises UserError if it does not load."""
        return self._load(self.folder, self.graph)

    def open_text_models(self) -> list[LanguageModel]:
        """Open a causal language model and its reference, if there is one: loaded WHOLE, or to be run block by block.

        Whole are those that something else is measured of as well, and those that an accelerator has room for.
        """
        streamed: dict[Path, StreamedModel] = {}
        if current_device_map() is None and not self._loaded:
            streamed = self.streamed
        if have_room(list(streamed.values())):
            streamed = {}
        places = [(self.folder, self.graph)]
        if self.reference is not None:
            places.append((self.reference, self.reference_graph))
        return [streamed.get(folder) or self._load(folder, graph) for folder, graph in places]

    @cached_property
    def streamed(self) -> dict[Path, StreamedModel]:
        """Those of the two that can be run block by block, by their folders."""
        graphs = {graph.parent for graph in (self.graph, self.reference_graph) if graph is not None}
        dtype = default_dtype(self.device)
        models = {each: StreamedModel.open(each, self.device, dtype) for each in self.folders if each not in graphs}
        return {folder: model for folder, model in models.items() if model is not None}

    def load_reference(self) -> PreTrainedModel:
        """Load the WHOLE reference, of which there has to be one. Raises UserError if it does not load."""
        assert self.reference is not None
        return self._load(self.reference, self.reference_graph)

    def _load(self, folder: Path, graph: Path | None) -> PreTrainedModel:
        place = graph or folder
        if place in self._loaded:
            return self._loaded[place]
        if graph is not None and self.open_graph is not None:
            model = self.open_graph(graph)
        else:
            if (lacking := lack_of_room([folder], self.device)) is not None:
                Notices()(f"{lacking}: close other programs, or say --device-map auto")
            model = load_model(folder, device=self.device, trust_remote_code=self.trust)
        if self.keeps:
            self._loaded[place] = model
        return model


def lack_of_room(folders: Iterable[Path], device: torch.device) -> str | None:
    """Say that models, loaded whole in float32, take more than the free memory has room for; None if they do not."""
    free, folders = available_bytes(), list(folders)
    if device.type != "cpu" or free is None or current_device_map() is not None:
        return None
    try:
        stored = [Checkpoint.open(str(folder), packed=True).tensors for folder in folders]
    except UserError:  # loading says what is wrong
        return None
    needed = torch.float32.itemsize * sum(tensor.numel for tensors in stored for tensor in tensors.values())
    if needed <= _ROOM * free:
        return None
    names = " and ".join(map(str, folders))
    loaded = "is loaded whole, in float32, and takes" if len(folders) == 1 else "are loaded whole, in float32, and take"
    return f"{names} {loaded} {human_bytes(needed)}, and {human_bytes(free)} of memory are free"
