"""Checkpoints with weights of few bits, in the form of compressed-tensors, which transformers and vLLM load."""
