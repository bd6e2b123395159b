"""Names of files that this tool writes and several of its rooms look for."""

REPORT = "ckpt_prune.json"
"""An output's report: how it was made, kept units and errors."""
