"""One small file of a Hub repository, out of the local cache where that will do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ckpt_prune.common.errors import UserError


def is_offline() -> bool:
    """Whether nothing may be asked of any network (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def explain_hub_error(error: BaseException) -> str:
    """What an error of the Hub's client says, in one line and without the token."""
    from huggingface_hub import get_token

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The server's own words stand last, behind the status, the request's id and what the client makes of them.
    said = (lines[0] if len(lines) < 2 else f"{lines[0].rstrip('.')}: {lines[-1]}") if lines else type(error).__name__
    token = get_token()
    return said.replace(token, "***") if token else said


@contextmanager
def show_hub_bars(shown: bool) -> Iterator[None]:
    """Have the Hub's client show its bars, or not; elsewhere than on a terminal they are a line each."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def fetch_hub_file(
    repo: str, name: str, revision: str | None = None, *, most: int, repo_type: Literal["model", "dataset"] = "model"
) -> Path:
    """A file of a repository, in the Hub's cache: below a folder that is named as the commit it is of.

    Args:
        repo: such as org/name.
        name: of the file, with slashes.
        revision: branch, tag or commit; None for the main branch.
        most: bytes that it may have, known before it is fetched.
        repo_type: what the repository holds.

    Raises:
        UserError: there is no such repository, revision or file, it is too large, or it can be had neither from the Hub
            nor from the cache.
    """
    # Imported here: most runs need nothing of the Hub.
    import huggingface_hub
    from huggingface_hub import errors

    what = f"{repo}/{name}" if revision is None else f"{repo}/{name}@{revision}"
    try:
        with show_hub_bars(False):
            if not is_offline():
                asked = huggingface_hub.hf_hub_download(
                    repo, name, revision=revision, repo_type=repo_type, dry_run=True
                )
                size = asked.file_size
                if (size or 0) > most:
                    raise UserError(f"{what} has {size} bytes on the Hub, and {most} are the most of such a file")
            return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision, repo_type=repo_type))
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(f"{repo} is gated; ask for access on its page and run `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is no Hub repository you can read; check the name, or run `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repo} has no revision {revision!r}; give a branch, tag or commit that exists") from error
    except errors.LocalEntryNotFoundError as error:
        cause = "HF_HUB_OFFLINE is set" if is_offline() else "the Hub cannot be reached"
        raise UserError(
            f"{what} is not in the Hub cache, and {cause}; fetch it once while connected, or give a file"
        ) from error
    except errors.EntryNotFoundError as error:
        at = "" if revision is None else f" at {revision}"
        raise UserError(f"{repo} has no file {name}{at} on the Hub; check the name") from error
    except (
        Exception
    ) as error:  # the client lets many kinds through (HTTP, TLS, disk, validation): one line for them all
        raise UserError(
            f"cannot fetch {what} from the Hub ({explain_hub_error(error)}); try again, or give a file"
        ) from error


def commit_of(cached: Path, name: str) -> str:
    """The commit that a file which `hub_file` gave is of."""
    return cached.parents[name.count("/")].name
