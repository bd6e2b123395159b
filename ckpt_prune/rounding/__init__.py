"""Rounding with error feedback into types whose scales are stored with the codes: pure functions of a weight."""
