"""Checkpoints with int8 or int4 weights in the compressed-tensors format, which transformers and vLLM load."""
