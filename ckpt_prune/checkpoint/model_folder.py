"""Where a MODEL argument lives: a folder as it is, or a Hub id brought into the local cache."""

import difflib
import os
import re
import stat
from pathlib import Path

from ckpt_prune.checkpoint.quantised import refuse_by_config, refuse_gguf
from ckpt_prune.common.errors import UserError

# Weights, configurations, tokenizers, model card; of folders inside only those of sentence-transformers' modules, which
# are numbered behind the model's own (1_Pooling). Never pickles, never code.
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README.md", "LICENSE*", "NOTICE*"]
_UNWANTED = ["[!1-9]*/*", "[1-9][!_]*/*", "*/*/*", "consolidated*.safetensors"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LONGEST_ID = 96
_CACHED = "models--"
"""Before the id in the name of a folder of the Hub's cache."""
_NEAR = 0.75
"""How alike names are that are suggested (`difflib`): one letter more or less in four."""


def resolve_model(model: str, *, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `model` itself where it is a folder, else the Hub snapshot of that id.

    Only safetensors, JSON, text and tokenizer files and the model card of a snapshot are downloaded. `HF_HUB_OFFLINE=1`
    is honoured: the cache answers or nothing does.

    Raises:
        UserError: no such folder or repository, no access, no network, or offline and not in the cache.
    """
    folder = find_local_folder(model)
    if folder is None:
        return _download(model, revision)
    if revision is not None:
        raise UserError(
            f"{model} is a folder, which has no revision {revision!r}; leave the revision out or give a Hub id"
        )
    return folder


def find_local_folder(model: str) -> Path | None:
    """`model` where it is a folder; None where it may be a Hub id.

    What is plainly a path is not asked of the Hub, which takes long to say that it has none: `org/name` is a path where
    a folder `org` is there.

    Raises:
        UserError: it can be neither.
    """
    if not model:  # Path("") would be the current folder
        raise UserError("the model's name is empty; give an existing folder or a Hub id such as org/name")
    path = Path(model)
    if _is_folder(path):
        refuse_gguf(path)
        return path
    if not _HUB_ID.fullmatch(model) or len(model) > _LONGEST_ID or model.startswith("."):
        raise UserError(
            f"{model} does not exist{suggest_folders(model)}; give an existing folder or a Hub id such as org/name"
        )
    if "/" in model and _is_folder(path.parent):
        raise UserError(
            f"the folder {path.parent} has no {path.name}{suggest_folders(model)}; if you mean the Hub's {model}, give "
            f"the folder that `hf download {model}` prints"
        )
    return None


def model_name(folder: Path) -> str:
    """What a model is called: its folder, or its Hub id where the folder is a snapshot in the Hub's cache.

    Bytes that are no Unicode, which no JSON can hold, are U+FFFD.
    """
    whole = folder.resolve()
    kept = whole.parent.parent.name
    if whole.parent.name == "snapshots" and kept.startswith(_CACHED):
        return kept.removeprefix(_CACHED).replace("--", "/")
    return os.fsencode(whole.name).decode(errors="replace")


def check_output_folder(given: Path) -> Path:
    """A folder that this tool wrote, which no Hub id names.

    Raises:
        UserError: there is no such folder.
    """
    if not _is_folder(given):
        raise UserError(f"{given} does not exist{suggest_folders(str(given))}; give a folder that this tool wrote")
    return given


def _is_folder(path: Path) -> bool:
    """Whether there is a folder of this name, or nothing.

    Raises:
        UserError: there is a file.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # also of a name that no file can have
        return False
    if not stat.S_ISDIR(mode):
        refuse_gguf(path)
        raise UserError(f"{path} is a file; give the folder that holds config.json")
    return True


def suggest_folders(missing: str) -> str:
    """The folders beside a missing one whose names are near to its own, as a question; nothing where there are none."""
    try:
        if missing.startswith("~"):  # which a shell leaves in quotes as it is
            home = Path(missing).expanduser()
            return f" (did you mean {home}?)" if home.is_dir() else ""
        path = Path(missing)
        beside = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
    except (OSError, RuntimeError, ValueError):  # unreadable, no such user, no name of a file
        return ""
    near = difflib.get_close_matches(path.name, beside, cutoff=_NEAR)
    return f" (did you mean {' or '.join(str(path.with_name(name)) for name in near)}?)" if near else ""


def _download(model: str, revision: str | None) -> Path:
    # Imported here: most runs name a folder and should not pay for it.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # The config first: of a model that is refused for it no weights are fetched.
        for wanted in (["config.json", "README.md"], _WANTED):
            folder = Path(
                huggingface_hub.snapshot_download(
                    model, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED
                )
            )
            refuse_by_config(folder)
        return folder
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated; ask for access at https://huggingface.co/{model} and run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{model} is neither a folder nor a Hub repository you can read{suggest_folders(model)}; "
            "check the name, or run `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{model} has no revision {revision!r} on the Hub; give a branch, tag or commit that exists"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise UserError(
            f"{model} is neither a folder nor in the Hub cache, and {cause}{suggest_folders(model)}; "
            f"give a folder, or run `hf download {model}` while connected"
        ) from error
    except (
        Exception
    ) as error:  # The Hub client lets many kinds through (HTTP, TLS, disk, validation): one line for them all.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"cannot download {model} from the Hub ({reason}); try again, or give a folder") from error
