"""Single files of repositories on the Hub, from the local cache if it has them; and what the Hub's client says."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices


def is_offline() -> bool:
    """Return whether the network must not be used (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def explain_hub_error(error: BaseException) -> str:
    """Return what an error of the Hub's client says, in one line and without the token."""
    from huggingface_hub import get_token

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The server's own words stand last, behind the status, the request's id and what the client makes of them.
    text = (lines[0] if len(lines) < 2 else f"{lines[0].rstrip('.')}: {lines[-1]}") if lines else type(error).__name__
    token = get_token()
    return text.replace(token, "***") if token else text


@contextmanager
def show_hub_bars(shown: bool) -> Iterator[None]:
    """Let the Hub's client show its bars or not. Elsewhere than on a terminal, each of their updates is a line."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


class _OneWarning(logging.Handler):
    """Says once that the Hub does not answer, in place of two lines for every try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        """Print our line for the first record that comes."""
        if not self._said:
            self._said = True
            Notices()("the Hub does not answer: trying again for half a minute (HF_HUB_OFFLINE=1 does not ask it)")


@contextmanager
def _warn_once() -> Iterator[None]:
    """Let the Hub's client print one line of ours about its tries, unless HF_HUB_VERBOSITY asks for more than warnings.

    What makes it fail in the end is in the error that it raises.
    """
    from huggingface_hub.utils import logging as hub_logging

    logger = hub_logging.get_logger("huggingface_hub")
    if logger.getEffectiveLevel() < logging.WARNING:
        yield
        return
    handlers, logger.handlers = logger.handlers, [_OneWarning()]
    try:
        yield
    finally:
        logger.handlers = handlers


@contextmanager
def hub_failures(
    repo: str,
    what: str,
    *,
    revision: str | None = None,
    given: Literal["file", "folder"],
    remedy: str,
    hint: str = "",
) -> Iterator[None]:
    """Turn the errors of the Hub's client while it downloads `what` into UserErrors.

    `given` is what the user can give instead, `remedy` helps if it is not in the cache, and `hint` follows the name of
    a missing thing.
    """
    from huggingface_hub import errors

    folder = given == "folder"
    try:
        with _warn_once():
            yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(f"{repo} is gated; ask for access on its page of the Hub and run `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is {'neither a folder nor a' if folder else 'no'} Hub repository you can read{hint}; check the "
            "name, or run `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{repo} has no revision {revision!r} on the Hub; give a branch, tag or commit that exists"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = "HF_HUB_OFFLINE is set" if is_offline() else "the Hub cannot be reached"
        raise UserError(
            f"{what} is {'neither a folder nor' if folder else 'not'} in the Hub cache, and {cause}{hint}; {remedy}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise UserError(f"{repo} has no file {what.removeprefix(f'{repo}/')} on the Hub; check the name") from error
    except Exception as error:  # the client lets many kinds through: HTTP, TLS, disk, validation
        reason = explain_hub_error(error)
        raise UserError(f"cannot download {what} from the Hub ({reason}); try again, or give a {given}") from error


def fetch_hub_file(
    repo: str, name: str, revision: str | None = None, *, most: int, repo_type: Literal["model", "dataset"] = "model"
) -> Path:
    """Download a file into the Hub's cache, where its folder is named after the commit.

    Args:
        repo: such as org/name.
        name: of the file, with slashes.
        revision: branch, tag or commit; None for the main branch.
        most: bytes that it may have, checked before it is downloaded.
        repo_type: of `repo`.
    """
    # Imported here: most runs need nothing of the Hub.
    import huggingface_hub

    what = f"{repo}/{name}" if revision is None else f"{repo}/{name}@{revision}"
    kind = "" if repo_type == "model" else f" --repo-type {repo_type}"
    at = f" --revision {revision}" if revision else ""
    remedy = f"run `hf download {repo} {name}{kind}{at}` while connected, or give a file"
    with hub_failures(repo, what, revision=revision, given="file", remedy=remedy), show_hub_bars(False):
        if not is_offline():
            plan = huggingface_hub.hf_hub_download(repo, name, revision=revision, repo_type=repo_type, dry_run=True)
            if (plan.file_size or 0) > most:
                raise UserError(f"{what} has {plan.file_size} bytes on the Hub, and {most} are the most of such a file")
        return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision, repo_type=repo_type))


def commit_of(cached: Path, name: str) -> str:
    """Return the commit of a file that `fetch_hub_file` returned for `name`."""
    return cached.parents[name.count("/")].name
