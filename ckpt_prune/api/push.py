"""`ckpt_prune.push`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.types import AnyModel
from ckpt_prune.api.verify import verify
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import show_progress
from ckpt_prune.common.short_repr import short_repr
from ckpt_prune.options import PushOptions, checked

if TYPE_CHECKING:
    from ckpt_prune.hub.outputs import OutputFiles
    from ckpt_prune.hub.repository import Repository


@dataclass(frozen=True)
class Pushed:
    """What was pushed, or would be.

    Attributes:
        repo: the repository.
        public: whether all may read it.
        files: name in the repository → bytes.
        removed: names of files that were there and are no more.
        left_out: what else is in the folder, and was not pushed.
        url: of the repository; None after a dry run.
        commit: that holds it; None after a dry run.
    """

    repo: str
    public: bool
    files: dict[str, int]
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    url: str | None = None
    commit: str | None = None

    def __repr__(self) -> str:
        size = sum(self.files.values())
        return short_repr(
            self,
            repo=self.repo,
            public=self.public,
            files=len(self.files),
            bytes=size,
            url=self.url,
            commit=self.commit,
        )

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "repo": self.repo,
            "public": self.public,
            "files": self.files,
            "bytes": sum(self.files.values()),
            "removed": list(self.removed),
            "left_out": list(self.left_out),
            "url": self.url,
            "commit": self.commit,
        }


def push(
    folder: AnyModel,
    repo: str,
    *,
    public: bool = False,
    overwrite: bool = False,
    base_model: str | None = None,
    license: str | None = None,
    evaluation: str | Sequence[str] = (),
    dry_run: bool = False,
    progress: bool = True,
) -> Pushed:
    """Share an output through the Hub, as `ckpt-prune push` does: verified first, then by one commit.

    Args:
        folder: an output of this tool. Only files that this tool wrote are pushed.
        repo: a repository on the Hub such as org/name; it is made where there is none.
        public: let all read it.
        overwrite: replace what this tool pushed there before; other files stay.
        base_model: Hub id of the dense model, for the card.
        license: of the output, for the card, in place of what the dense model's card said.
        evaluation: figures for the card, NAME=FILE: the data's name and what `evaluate --json` printed.
        dry_run: check everything; upload nothing.
        progress: show bars on stderr.

    Raises:
        UserError: the output is not whole, the repository is taken or cannot be written to, or the upload fails.
    """
    options = checked(PushOptions, locals())

    from ckpt_prune.hub.outputs import find_output_files, find_removed, make_card
    from ckpt_prune.hub.repository import find_repository

    with show_progress(progress):
        own = find_output_files(Path(options.folder))
        place = find_repository(options.repo, public=options.public)
        removed = find_removed(place, own, overwrite=options.overwrite)
        card = make_card(own, place.repo, options)
        found = verify(own.folder, progress=progress)
        failed = next((check for check in found.checks if check.passed is False), None)
        if failed is not None:
            raise UserError(f"{own.folder} is not whole ({failed.name}: {failed.detail}), so nothing was pushed")
        sizes = {name: len(card) if name == CARD else own.bytes(name) for name in own.files}
        pushed = Pushed(place.repo, options.public, sizes, removed, own.left_out)
        return pushed if options.dry_run else _sent(pushed, place, own, card)


CARD = "README.md"
_READ = 2**24
"""Bytes of a file up to which it may go to the Hub in the commit itself."""


def _sent(pushed: Pushed, place: "Repository", own: "OutputFiles", card: bytes) -> Pushed:
    from ckpt_prune._version import __version__
    from ckpt_prune.hub.repository import commit

    files: dict[str, Path | bytes] = {
        # What is not read here is read by the Hub's client when it uploads, and refused if it is another file then.
        name: card if name == CARD else own.folder / name if size > _READ else (own.folder / name).read_bytes()
        for name, size in pushed.files.items()
    }
    said = f"Made by ckpt_prune {__version__}"
    done = commit(place, files, remove=pushed.removed, message=said, unchanged=own.check_unchanged)
    return replace(pushed, url=done.url, commit=done.oid)
