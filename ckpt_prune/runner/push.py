"""`push`: an output is verified and sent to the Hub in one commit."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_prune._version import __version__
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.hub.outputs import OutputFiles, find_output_files, find_removed, make_card
from ckpt_prune.hub.repository import Repository, commit, find_repository
from ckpt_prune.options.commands import PushOptions, VerifyOptions
from ckpt_prune.runner.verify import verify_output

CARD = "README.md"
_READ = 2**24
"""Bytes up to which a file goes to the Hub in the commit itself."""


@dataclass(frozen=True)
class Pushed:
    """An output in a repository of the Hub; after a dry run, one that would be there.

    Attributes:
        files: name in the repository → bytes.
        removed: names of files that were in the repository before.
        left_out: what else is in the folder.
        url: of the repository; None after a dry run, like `commit`.
    """

    repo: str
    public: bool
    files: dict[str, int]
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    url: str | None = None
    commit: str | None = None

    def __repr__(self) -> str:
        shown = {"files": len(self.files), "bytes": sum(self.files.values()), "url": self.url, "commit": self.commit}
        return short_repr(self, repo=self.repo, public=self.public, **shown)

    def data(self) -> dict[str, Any]:
        return asdict(self) | {"bytes": sum(self.files.values())}


def push_output(options: PushOptions) -> Pushed:
    """Verify an output, and share it (`ckpt_prune.push`)."""
    output = find_output_files(Path(options.folder))
    place = find_repository(options.repo, public=options.public)
    removed = find_removed(place, output, overwrite=options.overwrite)
    card = make_card(output, place.repo, options)
    verification = verify_output(VerifyOptions(folder=str(output.folder)))
    failed = next((check for check in verification.checks if check.passed is False), None)
    if failed is not None:
        raise UserError(f"{output.folder} is not whole ({failed.name}: {failed.detail}), so nothing was pushed")
    sizes = {name: len(card) if name == CARD else output.bytes(name) for name in output.files}
    pushed = Pushed(place.repo, options.public, sizes, removed, output.left_out)
    return pushed if options.dry_run else _sent(pushed, place, output, card)


def _sent(pushed: Pushed, place: Repository, output: OutputFiles, card: bytes) -> Pushed:
    files: dict[str, Path | bytes] = {
        # The Hub's client reads the other files when it uploads; they are refused if they have changed by then.
        name: card if name == CARD else output.folder / name if size > _READ else (output.folder / name).read_bytes()
        for name, size in pushed.files.items()
    }
    message = f"Made by ckpt_prune {__version__}"
    pushed_commit = commit(place, files, remove=pushed.removed, message=message, unchanged=output.check_unchanged)
    return replace(pushed, url=pushed_commit.url, commit=pushed_commit.oid)
