"""What several functions take and several give."""

import os
from collections.abc import Sequence
from typing import Literal, Protocol

AnyPath = str | os.PathLike[str]
Texts = AnyPath | Sequence[AnyPath]
"""A text file, or several."""
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
Bos = Literal["auto", "always", "never"]
Choose = Literal["random", "first"]
Provider = Literal["cpu", "cuda"]


class HasPath(Protocol):
    """A result with a folder: it stands for that folder wherever a model is asked for."""

    @property
    def path(self) -> os.PathLike[str]:
        """The folder."""


AnyModel = AnyPath | HasPath
"""A folder, a Hub id, or what a function of this package has written."""
