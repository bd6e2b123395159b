"""Where a MODEL argument lives: a folder as it is, or a Hub id brought into the local cache."""

import re
from pathlib import Path

from ckpt_prune.errors import UserError

# Top-level files only: weights, configurations, tokenizers, model card. Never pickles, never code.
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README.md", "LICENSE*", "NOTICE*"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve(model: str, *, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `model` itself where it is a folder, else the Hub snapshot of that id.

    Only safetensors, JSON, text and tokenizer files and the model card of a snapshot are downloaded. `HF_HUB_OFFLINE=1`
    is honoured: the cache answers or nothing does.

    Raises:
        UserError: no such folder or repository, no access, no network, or offline and not in the cache.
    """
    folder = local_folder(model)
    if folder is None:
        return _download(model, revision)
    if revision is not None:
        raise UserError(
            f"{model} is a folder, which has no revision {revision!r}; leave the revision out or give a Hub id"
        )
    return folder


def local_folder(model: str) -> Path | None:
    """`model` where it is a folder; None where it may be a Hub id.

    Raises:
        UserError: it can be neither.
    """
    if not model:  # Path("") would be the current folder
        raise UserError("the model's name is empty; give an existing folder or a Hub id such as org/name")
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{model} is a file; give the folder that holds config.json")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise UserError(f"{model} does not exist; give an existing folder or a Hub id such as org/name")
    return None


def _download(model: str, revision: str | None) -> Path:
    # Imported here: most runs name a folder and should not pay for it.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated; ask for access at https://huggingface.co/{model} and run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{model} is neither a folder nor a Hub repository you can read; "
            "check the name, or run `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{model} has no revision {revision!r} on the Hub; give a branch, tag or commit that exists"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise UserError(
            f"{model} is neither a folder nor in the Hub cache, and {cause}; "
            f"give a folder, or run `hf download {model}` while connected"
        ) from error
    except (
        Exception
    ) as error:  # The Hub client lets many kinds through (HTTP, TLS, disk, validation): one line for them all.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cannot download {model} from the Hub ({reason}); try again, or give a folder") from error
