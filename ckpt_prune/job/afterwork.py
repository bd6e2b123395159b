"""Work that follows an output: what a stage makes of the finished folder before that takes its place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol


class Afterwork(Protocol):
    """Work of a stage on an output that is complete but for it. If it is killed, the resumed run does it again.

    `key` is that of its result in `--json`, `noun` what it makes. `bytes` says what it writes at most, `command` which
    command makes it later. `run` makes it in the folder; its result has a `path`.
    """

    key: ClassVar[str]
    noun: ClassVar[str]

    def bytes(self, parameters: int) -> int: ...

    def is_done(self, output: Path) -> bool: ...

    def run(self, output: Path) -> Any: ...

    def command(self, output: Path) -> str: ...


@dataclass(frozen=True)
class Followed:
    """The result of an afterwork, or the reason why it failed and a line that says what the output lacks."""

    key: str
    result: Any = None
    failure: str | None = None
    lacking: str = ""
