"""Importance rotations, learned before a mask and absorbed into the weights (DenoiseRotator)."""
