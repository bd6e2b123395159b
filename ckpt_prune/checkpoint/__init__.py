"""Checkpoint folders: found, read lazily, written atomically, fingerprinted. Knows nothing of pruning."""
