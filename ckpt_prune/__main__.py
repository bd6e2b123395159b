"""`python -m ckpt_prune`."""

from ckpt_prune.cli.main import main

main(prog_name="ckpt-prune")
