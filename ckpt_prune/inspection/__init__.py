"""The answer of `inspect`: what a checkpoint is, in figures."""
