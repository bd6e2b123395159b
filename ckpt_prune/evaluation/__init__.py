"""Measuring checkpoints: perplexity, tasks, and comparison with another; the room that loads whole models."""
