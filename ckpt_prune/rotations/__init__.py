"""Importance rotations: learning them and absorbing them into tensors."""
