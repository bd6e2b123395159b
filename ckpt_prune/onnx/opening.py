"""Opening a graph to be measured in the place of a checkpoint."""

from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx.session import OnnxModel, Provider


def open_graph(graph: Path, provider: Provider) -> PreTrainedModel:
    """A graph, as what is called like the model it came from.

    Raises:
        UserError: onnxruntime cannot load it, or it returns neither logits nor hidden states.
    """
    model = OnnxModel(graph.parent, graph.name, provider=provider)
    if not {"logits", "last_hidden_state"} & set(model.outputs):
        raise UserError(f"{graph} returns {', '.join(list(model.outputs)[:3])}: neither logits nor last_hidden_state")
    return cast(PreTrainedModel, model)
