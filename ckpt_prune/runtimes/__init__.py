"""Proofs of outputs in the runtimes that serve them: one module for each, with one function `run`."""
