"""Measuring a causal language model by its answers: multiple-choice items, and what it says after a prompt."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ckpt_prune.calibration.text import Bos, load_tokenizer
from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.choice_items import read_items
from ckpt_prune.evaluation.choices import ChoiceScore, answer
from ckpt_prune.evaluation.generation import Continuation, continue_prompts
from ckpt_prune.evaluation.purpose import check_folder, check_generates, check_same_kind
from ckpt_prune.evaluation.results import ChoiceResult, GenerationResult
from ckpt_prune.evaluation.texts import Pair


def measure_choices(pair: Pair, files: Sequence[Path], limit: int | None, bos: Bos) -> ChoiceResult:
    """Let a model, and a reference where there is one, answer files of items.

    Args:
        pair: the two.
        files: of items.
        limit: only the first so many of each file.
        bos: begin-of-sequence token before each text.

    Raises:
        UserError: a file holds no items, two have one name, or the model does not generate text.
    """
    _check(pair)
    tasks = {file.stem: read_items(file, limit) for file in files}
    if len(tasks) < len(files):
        raise UserError("--tasks: two files have the same name: figures could not be told apart")

    def scores(model: PreTrainedModel, folder: Path) -> dict[str, ChoiceScore]:
        tokenizer = load_tokenizer(folder)
        return {name: answer(model, tokenizer, items, bos=bos, what=name) for name, items in tasks.items()}

    other = None if pair.reference is None else scores(pair.load_reference(), pair.reference)
    return ChoiceResult(pair.name, scores(pair.load(), pair.folder), pair.reference_name, other)


def measure_generation(pair: Pair, prompts: Sequence[str], tokens: int) -> GenerationResult:
    """Let a model, and a reference where there is one, continue prompts greedily.

    Args:
        pair: the two.
        prompts: to continue.
        tokens: after each, at most.

    Raises:
        UserError: the model does not generate text, or a prompt does not suit it.
    """
    _check(pair)

    def said(model: PreTrainedModel, folder: Path) -> tuple[Continuation, ...]:
        return tuple(continue_prompts(model, load_tokenizer(folder), prompts, tokens=tokens))

    other = None if pair.reference is None else said(pair.load_reference(), pair.reference)
    return GenerationResult(pair.name, tuple(prompts), said(pair.load(), pair.folder), pair.reference_name, other)


def _check(pair: Pair) -> None:
    for path in (pair.folder, pair.reference):
        if path is None:
            continue
        check_folder(path)
        check_generates(path)
    check_same_kind(pair.folder, pair.reference)
    if pair.reference is not None and tokenizer_fingerprint(pair.folder) != tokenizer_fingerprint(pair.reference):
        raise UserError(f"{pair.folder} and {pair.reference} have different tokenizers: they read a text differently")
