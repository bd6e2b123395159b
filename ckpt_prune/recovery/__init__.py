"""Recovering pruned models: LaCo."""
