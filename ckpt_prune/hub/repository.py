"""A model repository on the Hub as the target of a push: checked first, then changed by one commit."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.hub_files import explain_hub_error, is_offline, show_hub_bars
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import are_bars_shown

_REPO = re.compile(r"(?:(?P<owner>[\w.-]+)/)?(?P<name>[\w.-]+)")
_LONGEST = 96
_HUB_FILES = {".gitattributes"}
"""Files that the Hub puts into a new repository."""


@dataclass(frozen=True)
class Repository:
    """A repository, as it was found.

    Attributes:
        public: whether everyone may read it, or will.
        commit: at its head; None if the repository does not exist.
        files: names of its files.
    """

    repo: str
    public: bool
    commit: str | None
    files: frozenset[str]

    @property
    def empty(self) -> bool:
        """Whether it has only the files of a new repository."""
        return self.files <= _HUB_FILES


@dataclass(frozen=True)
class PushedCommit:
    """Address of the repository, and name of the commit."""

    url: str
    oid: str


def find_repository(repo: str, *, public: bool) -> Repository:
    """Look at a repository and check that it may be written to, without changing anything.

    Args:
        repo: its id; without an owner, one of the user's.
        public: whether everyone shall be able to read what is pushed.
    """
    match = _REPO.fullmatch(repo)
    if match is None or len(repo) > _LONGEST or ".." in repo or "--" in repo or repo[-1] in ".-":
        raise UserError(f"{repo!r} is no name of a Hub repository; give one such as org/name")
    if is_offline():
        raise UserError(f"{repo} cannot be pushed to: HF_HUB_OFFLINE is set")

    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.get_token() is None:
        raise UserError("there is no token of the Hub: run `hf auth login`, or set HF_TOKEN")
    api = huggingface_hub.HfApi()
    try:
        name = f"{_check_owner(api.whoami(), match['owner'])}/{match['name']}"
        info = api.model_info(name)
    except errors.RepositoryNotFoundError:
        return Repository(name, public, None, frozenset())
    except UserError:
        raise
    except Exception as error:  # whatever the client lets through
        raise UserError(f"the Hub cannot be asked about {repo} ({explain_hub_error(error)})") from error
    if info.private == public:
        state, remedy = ("private", "leave --public out") if info.private else ("public", "say --public")
        raise UserError(f"{name} is there and {state}: {remedy}, or choose another name")
    files = frozenset(file.rfilename for file in info.siblings or [])
    if ".gitignore" in files:  # the Hub's client silently leaves out what it names
        raise UserError(f"{name} has a .gitignore, which may keep files out of a push: remove it there")
    return Repository(name, public, info.sha, files)


def _check_owner(user: Mapping[str, Any], owner: str | None) -> str:
    """Return the owner of the repository, the user by default, if the token may write there."""
    name = str(user["name"])
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise UserError(f"the token of {name} may only read: make one that may write at the Hub's settings")
    organisations = [str(organisation.get("name")) for organisation in user.get("orgs") or []]
    if owner not in (None, name, *organisations):
        raise UserError(f"the token is {name}'s, who is no member of {owner}: choose a name such as {name}/NAME")
    return owner or name


def commit(
    place: Repository,
    files: Mapping[str, Path | bytes],
    *,
    remove: Iterable[str] = (),
    message: str,
    unchanged: Callable[[], None] = lambda: None,
) -> PushedCommit:
    """Put files into a repository by one commit, all or none. The repository is made if it does not exist.

    Args:
        place: as it was found; if it has changed since, nothing is committed.
        files: name in the repository → a file, or its content.
        remove: names of files to remove.
        message: of the commit.
        unchanged: called once the digests of the files are taken; may refuse.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    operations: list[huggingface_hub.CommitOperationAdd | huggingface_hub.CommitOperationDelete] = [
        huggingface_hub.CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    operations += [huggingface_hub.CommitOperationDelete(name, is_folder=False) for name in sorted(remove)]
    unchanged()
    state = "it is as it was"
    try:
        if place.commit is None:
            state = "nothing was made of it"
            api.create_repo(place.repo, private=not place.public)
            state = "it was made, and is empty"
        with show_hub_bars(are_bars_shown()):
            commit_info = api.create_commit(place.repo, operations, commit_message=message, parent_commit=place.commit)
    except Exception as error:  # whatever the client lets through
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        raise UserError(
            f"{place.repo} cannot be pushed to ({explain_hub_error(cause)}); {state}: push again"
        ) from error
    return PushedCommit(f"{api.endpoint}/{place.repo}", commit_info.oid)
