"""Several processes that share a job (README.md)."""
