"""The report of an output: what was done to a model, and what was measured while doing it."""
