"""The tokenizer and generation_config.json of an output: whether they load."""

from importlib.util import find_spec
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.skeleton import quiet_transformers

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG)


def has_side_files(folder: Path) -> bool:
    """Return whether a folder has a tokenizer or a generation_config.json."""
    return any((folder / name).is_file() for name in (*TOKENIZERS, GENERATION_CONFIG_NAME))


def check_side_files(folder: Path) -> tuple[bool | None, str]:
    """Load the tokenizer and generation_config.json of a folder, as far as it has them.

    None if a tokenizer cannot be loaded here, because it needs code of its own or a package.
    """
    loaded = []
    if (folder / GENERATION_CONFIG_NAME).is_file():
        _load_generation_config(folder)
        loaded.append(GENERATION_CONFIG_NAME)
    present = [name for name in TOKENIZERS if (folder / name).is_file()]
    if present:
        if (folder / TOKENIZER_CONFIG).is_file() and "auto_map" in read_json_object(folder / TOKENIZER_CONFIG):
            return None, "the tokenizer needs code of its own, which is not run"
        if present[0] == "tokenizer.model" and find_spec("sentencepiece") is None:
            return None, "the tokenizer is not loaded: without a tokenizer.json that takes the package sentencepiece"
        load_tokenizer(folder)
        loaded.append("tokenizer")
    return True, f"{' and '.join(reversed(loaded))} load{'s' if len(loaded) == 1 else ''}"


def _load_generation_config(folder: Path) -> None:
    path = folder / GENERATION_CONFIG_NAME
    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises anything here
        read_json_object(path)
        raise UserError(f"{path} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
