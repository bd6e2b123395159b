"""Work that follows an output: what a stage makes of the finished folder before that takes its place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol


class Afterwork(Protocol):
    """What a stage makes of an output that lacks nothing else. A run that resumes one killed in it makes it again.

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
    """What came of an afterwork: its result, or why it could not be done, and a line that says what is lacking."""

    key: str
    result: Any = None
    failure: str | None = None
    lacking: str = ""
