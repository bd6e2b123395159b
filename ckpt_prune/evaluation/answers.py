"""Measuring a causal language model by its answers: multiple-choice items, and continuations of prompts."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.choice_items import read_items
from ckpt_prune.evaluation.choices import ChoiceScore, answer
from ckpt_prune.evaluation.generation import GeneratedText, continue_prompts
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_folder, check_generates, check_same_kind, check_same_tokenizer
from ckpt_prune.evaluation.results import ChoiceResult, GenerationResult
from ckpt_prune.measure.samples.text import Bos, load_tokenizer


def measure_choices(pair: Pair, files: Sequence[Path], limit: int | None, bos: Bos) -> ChoiceResult:
    """Let a model, and its reference, answer the items of files, or the first `limit` of each."""
    _check(pair)
    tasks = {file.stem: read_items(file, limit) for file in files}
    if len(tasks) < len(files):
        raise UserError("--tasks: two files have the same name: figures could not be told apart")

    def measure(model: PreTrainedModel, folder: Path) -> dict[str, ChoiceScore]:
        tokenizer = load_tokenizer(folder)
        return {name: answer(model, tokenizer, items, bos=bos, what=name) for name, items in tasks.items()}

    references = None if pair.reference is None else measure(pair.load_reference(), pair.reference)
    return ChoiceResult(pair.name, measure(pair.load(), pair.folder), pair.reference_name, references)


def measure_generation(pair: Pair, prompts: Sequence[str], tokens: int) -> GenerationResult:
    """Let a model, and its reference, continue prompts greedily, by at most so many tokens."""
    _check(pair)

    def measure(model: PreTrainedModel, folder: Path) -> tuple[GeneratedText, ...]:
        return tuple(continue_prompts(model, load_tokenizer(folder), prompts, tokens=tokens))

    reference = None if pair.reference is None else measure(pair.load_reference(), pair.reference)
    return GenerationResult(
        pair.name, tuple(prompts), measure(pair.load(), pair.folder), pair.reference_name, reference
    )


def _check(pair: Pair) -> None:
    for folder in pair.folders:
        check_folder(folder)
        check_generates(folder)
    check_same_kind(pair.folder, pair.reference)
    check_same_tokenizer(pair.folder, pair.reference)
