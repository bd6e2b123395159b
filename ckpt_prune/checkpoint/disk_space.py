"""Room on a disk: refused before work where there is too little, and reserved for files that are filled later."""

import errno
import os
import shutil
from pathlib import Path

from ckpt_prune.common.errors import DiskError
from ckpt_prune.common.formatting import human_bytes

_MARGIN_BYTES = 64 * 2**20
"""For small files beside the weights."""


def check_free_space(folder: Path, needed: int, what: str = "the output needs", remedy: str = "") -> None:
    """Refuse to begin if `needed` bytes, and a margin for small files, do not fit on the disk of `folder`.

    `what` needs them, with the verb; `remedy` is another than freeing space.
    """
    free = shutil.disk_usage(folder).free
    needed += _MARGIN_BYTES
    if needed > free:
        raise DiskError(
            f"{folder} has {human_bytes(free)} free and {what} {human_bytes(needed)}; "
            f"free space or choose another place{remedy}"
        )


def reserve_space(descriptor: int, size: int) -> None:
    """Lengthen a file to `size`, and reserve the space if the file system can."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)
