"""Pruning done on a whole dense model: consumers refitted from activations, dropped columns set to zero."""

from transformers import PreTrainedModel

from ckpt_prune.model.descriptions import load_family

CONSUMERS = {"heads": "self_attn.o_proj", "mlp": "mlp.down_proj"}


def per_unit(model: PreTrainedModel, space: str) -> int:
    columns, config = load_family(model.config.model_type).columns[space].columns, model.config
    return columns.per_unit(lambda name: load_family(config.model_type).dimension(config, name))
