"""Pruning done on a whole dense model: consumers refitted from activations, dropped columns set to zero."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ckpt_prune.model.descriptions import load_family
from tests.encoders import STRENGTH, STRENGTHLESS, WITH_STRENGTH, columns_of
from tests.families import BLOCKS, stock
from tests.oracles import scores
from tests.oracles.streams import inputs_of

CONSUMERS = {"heads": "self_attn.o_proj", "mlp": "mlp.down_proj"}
METHODS = ["none", "bias", "rotation-scale", *WITH_STRENGTH]
BIASED = {"bias", "affine"}


def per_unit(model: PreTrainedModel, space: str) -> int:
    columns, config = load_family(model.config.model_type).columns[space].columns, model.config
    return columns.per_unit(lambda name: load_family(config.model_type).dimension(config, name))


def prune_whole(
    folder: Path, windows: Tensor, keep: dict[str, int], *, method: str, score: str
) -> tuple[PreTrainedModel, dict[tuple[int, str], list[int]]]:
    """The dense model of `folder` with its consumers as if pruned, and the kept units of every site."""
    model = stock(folder, dtype=torch.float32)
    paths = {(b, s): f"model.layers.{b}.{CONSUMERS[s]}" for b in range(BLOCKS) for s in keep}
    inputs = inputs_of(model, paths.values(), windows)
    kept = {}
    for (block, space), path in paths.items():
        consumer, X = model.get_submodule(path), inputs[path]
        W = consumer.weight.detach().double().numpy()
        per = per_unit(model, space)
        kept[block, space] = scores.kept_units(scores.SCORES[score](W, X), per, keep[space])
        K = columns_of(kept[block, space], per)
        Y = X @ W.T
        if method in WITH_STRENGTH:
            strength = STRENGTH * float(np.mean(np.sum(X[:, K] ** 2, axis=0)))
            weight, bias = WITH_STRENGTH[method](W[:, K], X[:, K], Y, strength)
        else:
            weight, bias = STRENGTHLESS[method](W[:, K], X[:, K], Y)
        with torch.no_grad():
            consumer.weight.zero_()
            consumer.weight[:, K] = torch.from_numpy(weight).float()
            if consumer.bias is None:
                consumer.bias = nn.Parameter(torch.zeros(len(W)))
            consumer.bias += torch.from_numpy(bias).float()
    return model, kept
