"""Recover by LoRA: the runner. It waits for the one runner of all jobs (runner/)."""
