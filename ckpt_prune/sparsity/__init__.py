"""Unstructured and N:M masks, and the rotations learned before them."""
