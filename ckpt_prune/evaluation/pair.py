"""A model and the one it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ckpt_prune.evaluation.whole_model import load_model


@dataclass(frozen=True)
class Pair:
    """A model, and perhaps a reference.

    Attributes:
        trust: run code that a folder brings.
        graph, reference_graph: their ONNX graphs, if they are graphs; the folders are those that they lie in.
        open_graph: opens a graph as what is called like a model. It belongs to another room.
        keeps: hold each model once it is loaded, because several measurements follow.
    """

    folder: Path
    reference: Path | None
    device: torch.device
    trust: bool
    graph: Path | None = None
    reference_graph: Path | None = None
    open_graph: Callable[[Path], PreTrainedModel] | None = None
    keeps: bool = False
    _loaded: dict[Path, PreTrainedModel] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> Path:
        """The model, as results name it."""
        return self.graph or self.folder

    @property
    def reference_name(self) -> Path | None:
        """The reference, as results name it."""
        return self.reference_graph or self.reference

    @property
    def folders(self) -> list[Path]:
        return [self.folder] if self.reference is None else [self.folder, self.reference]

    def load(self) -> PreTrainedModel:
        """Load the WHOLE model. Raises UserError if it does not load."""
        return self._load(self.folder, self.graph)

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
            model = load_model(folder, device=self.device, trust_remote_code=self.trust)
        if self.keeps:
            self._loaded[place] = model
        return model
