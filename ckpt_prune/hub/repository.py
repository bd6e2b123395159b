"""A model repository on the Hub that something is to be pushed to: checked first, changed by one commit."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_prune.checkpoint.hub_files import explain_hub_error, is_offline, show_hub_bars
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import are_bars_shown

_REPO = re.compile(r"(?:(?P<owner>[\w.-]+)/)?(?P<name>[\w.-]+)")
_LONGEST = 96
_OF_THE_HUB = {".gitattributes"}
"""What the Hub puts into a new repository."""


@dataclass(frozen=True)
class Repository:
    """A repository, as it was found.

    Attributes:
        repo: such as org/name.
        public: whether all may read it, or will.
        commit: at its head; None where there is no repository yet.
        files: that it has.
    """

    repo: str
    public: bool
    commit: str | None
    files: frozenset[str]

    @property
    def empty(self) -> bool:
        """Whether nobody has put anything there."""
        return self.files <= _OF_THE_HUB


@dataclass(frozen=True)
class PushedCommit:
    """What a push came to: the repository's address, and the commit."""

    url: str
    oid: str


def find_repository(repo: str, *, public: bool) -> Repository:
    """Look at a repository, and whether it may be written to, without changing anything.

    Args:
        repo: its id; without an owner, one of the user.
        public: whether all may read what is pushed.

    Raises:
        UserError: the id is none, there is no network, no token or one that may only read, the owner is somebody else,
            or a repository is there that is public where a private one is meant, or the other way round.
    """
    found = _REPO.fullmatch(repo)
    if found is None or len(repo) > _LONGEST or ".." in repo or "--" in repo or repo[-1] in ".-":
        raise UserError(f"{repo!r} is no name of a Hub repository; give one such as org/name")
    if is_offline():
        raise UserError(f"{repo} cannot be pushed to: HF_HUB_OFFLINE is set")

    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.get_token() is None:
        raise UserError("there is no token of the Hub: run `hf auth login`, or set HF_TOKEN")
    api = huggingface_hub.HfApi()
    try:
        owner = _owner(api.whoami(), found["owner"])
        whole = f"{owner}/{found['name']}"
        there = api.model_info(whole)
    except errors.RepositoryNotFoundError:
        return Repository(whole, public, None, frozenset())
    except UserError:
        raise
    except Exception as error:  # whatever the client lets through
        raise UserError(f"the Hub cannot be asked about {repo} ({explain_hub_error(error)})") from error
    if there.private == public:
        seen, remedy = ("private", "leave --public out") if there.private else ("public", "say --public")
        raise UserError(f"{whole} is there and {seen}: {remedy}, or choose another name")
    names = frozenset(each.rfilename for each in there.siblings or [])
    if ".gitignore" in names:  # the Hub's client leaves out in silence what it names
        raise UserError(f"{whole} has a .gitignore, which may keep files out of a push: remove it there")
    return Repository(whole, public, there.sha, names)


def _owner(user: Mapping[str, object], asked: str | None) -> str:
    """Whose repository it will be. Raises UserError where the token may not write there."""
    name = str(user["name"])
    auth = user.get("auth")
    token = auth.get("accessToken") if isinstance(auth, dict) else None
    if isinstance(token, dict) and token.get("role") == "read":
        raise UserError(f"the token of {name} may only read: make one that may write at the Hub's settings")
    orgs = user.get("orgs")
    theirs = [str(each.get("name")) for each in orgs if isinstance(each, dict)] if isinstance(orgs, list) else []
    if asked not in (None, name, *theirs):
        raise UserError(f"the token is {name}'s, who is no member of {asked}: choose a name such as {name}/NAME")
    return asked or name


def commit(
    place: Repository,
    files: Mapping[str, Path | bytes],
    *,
    remove: Iterable[str] = (),
    message: str,
    unchanged: Callable[[], None] = lambda: None,
) -> PushedCommit:
    """Put files into a repository, which is made where there is none, by one commit: all of them or none.

    Args:
        place: as it was found; where it has changed since, nothing is committed.
        files: name in the repository → a file, or its content.
        remove: names of files that go.
        message: of the commit.
        unchanged: called once what is uploaded is settled by its digest; may refuse.

    Raises:
        UserError: it failed, and what has become of the repository.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    operations: list[huggingface_hub.CommitOperationAdd | huggingface_hub.CommitOperationDelete] = [
        huggingface_hub.CommitOperationAdd(name, given if isinstance(given, bytes) else str(given))
        for name, given in files.items()
    ]
    operations += [huggingface_hub.CommitOperationDelete(name, is_folder=False) for name in sorted(remove)]
    unchanged()
    left = "it is as it was"
    try:
        if place.commit is None:
            left = "nothing was made of it"
            api.create_repo(place.repo, private=not place.public)
            left = "it was made, and is empty"
        with show_hub_bars(are_bars_shown()):
            done = api.create_commit(place.repo, operations, commit_message=message, parent_commit=place.commit)
    except Exception as error:  # whatever the client lets through
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        raise UserError(f"{place.repo} cannot be pushed to ({explain_hub_error(cause)}); {left}: push again") from error
    return PushedCommit(f"{api.endpoint}/{place.repo}", done.oid)
