"""Reading a graph that may be damaged, or anybody's."""

import logging
from pathlib import Path

import onnx_ir

from ckpt_prune.common.errors import UserError


def read_graph(path: Path) -> onnx_ir.Model:
    """A graph; its weights are read when they are asked for.

    What onnx_ir warns of, other checks find too; its warnings hold names as they stand in the file, control characters
    included.

    Raises:
        UserError: it cannot be read.
    """
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return onnx_ir.load(path)
    except Exception as error:  # protobuf's and onnx_ir's exceptions share no base class
        raise UserError(f"{path.name} cannot be read: {' '.join(str(error).split())[:300]}") from error
    finally:
        logger.setLevel(before)
