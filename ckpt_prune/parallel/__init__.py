"""Several processes at one job: what each does of it, and how it ends for all of them (README.md)."""
