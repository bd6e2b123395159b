"""Fewer dimensions of the residual stream (SliceGPT)."""
