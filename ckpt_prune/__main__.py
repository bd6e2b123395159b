"""`python -m ckpt_prune`.

Python puts the working folder in front of all others here, and files such as `numpy.py` in it would be run.
"""

import sys

from ckpt_prune.common.child_process import import_path

sys.path[:] = import_path()

from ckpt_prune.cli.main import main  # noqa: E402 - behind what makes imports safe

main(prog_name="ckpt-prune")
