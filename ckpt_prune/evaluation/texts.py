"""Measuring a model of text: perplexity, masked tokens, predictions, embeddings or features, whichever it gives."""

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ckpt_prune.checkpoint.sentence_modules import MODULES, read_modules, read_ranked_tokens
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_windows
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.heads import compare_heads
from ckpt_prune.evaluation.masked import choose_masked, fill_in
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.perplexity import TokenComparison, compare, perplexity
from ckpt_prune.evaluation.purpose import (
    LABELLED,
    check_folder,
    check_same_kind,
    check_same_tokenizer,
    is_vision,
    reference_of_base,
)
from ckpt_prune.evaluation.results import ComparisonResult, MaskedResult, PerplexityResult
from ckpt_prune.evaluation.sentences import SentenceModel, compare_sentences
from ckpt_prune.evaluation.whole_model import auto_class, purpose_of_folder, read_config
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.samples.text import (
    add_frame,
    count_frame_tokens,
    cut_windows,
    load_tokenizer,
    read_text,
    tokenise_text,
)
from ckpt_prune.model.purposes import WITHOUT_HEAD
from ckpt_prune.options.data import EvaluationOptions

TextResult = PerplexityResult | MaskedResult | ComparisonResult


def measure_text(pair: Pair, options: EvaluationOptions) -> TextResult:
    """Measure a model of text, and compare it with its reference."""
    assert options.window is not None
    folder = pair.folder
    for path in pair.folders:
        check_folder(path)
        if is_vision(path):
            raise UserError(f"{path} is a vision model: --text does not go with it; measure it with --images")
    check_same_tokenizer(folder, pair.reference)
    check_same_kind(folder, pair.reference)
    purpose = purpose_of_folder(folder)
    base = reference_of_base(folder, pair.reference) if purpose in WITHOUT_HEAD else None
    if purpose in LABELLED and pair.reference is None:
        raise UserError(
            f"{folder} is for {purpose}, and nothing here says what is right: compare it with --against MODEL2"
        )
    if purpose in ("text-generation", "image-text-to-text"):
        return _measure_perplexity(pair, options)
    if purpose not in ("fill-mask", *LABELLED, *WITHOUT_HEAD):
        auto = auto_class(read_config(folder)).removeprefix("AutoModelFor")
        raise UserError(f"{folder} is a {auto} model, which evaluate does not measure")
    tokenizer = load_tokenizer(folder)
    if base is not None and read_modules(folder):
        return _compare_sentences(pair, base, tokenizer, options)
    frame = count_frame_tokens(tokenizer)
    if options.window < frame + 2:
        raise UserError(f"--window {options.window} is too short: the tokenizer adds {frame} tokens of its own")
    stream = tokenise_text(tokenizer, read_text(options.text, tokenizer), bos="never")
    windows = cut_windows(stream, window=options.window, limit=options.samples, frame=frame)
    windows = add_frame(windows, tokenizer)
    if purpose == "fill-mask":
        return _measure_masked(pair, tokenizer, windows)
    assert pair.reference_name is not None
    model, reference = pair.load(), pair.load_reference()
    if purpose in LABELLED:
        ranked = read_ranked_tokens(folder) if purpose == "text-ranking" else None
        per_token = purpose == "token-classification"
        predictions = compare_heads(model, reference, windows, per_token=per_token, ranked=ranked)
        return ComparisonResult(pair.name, pair.reference_name, predictions)
    for each in (model, reference):
        check_windows(each, windows)
    features = compare_features(model, reference, TokenWindows(windows))
    return ComparisonResult(pair.name, pair.reference_name, features)


def _measure_perplexity(pair: Pair, options: EvaluationOptions) -> PerplexityResult:
    assert options.window is not None
    tokenizer = load_tokenizer(pair.folder)
    stream = tokenise_text(tokenizer, read_text(options.text, tokenizer), bos=options.bos)
    windows = cut_windows(stream, window=options.window, limit=options.samples)
    model = pair.load()
    if pair.reference is None:
        return PerplexityResult(pair.name, perplexity(model, windows))
    both = compare(model, pair.load_reference(), windows)
    return PerplexityResult(
        pair.name, both.score, pair.reference_name, both.reference_score, both.kl, both.top1_agreement
    )


def _measure_masked(pair: Pair, tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> MaskedResult:
    if tokenizer.mask_token_id is None:
        raise UserError(f"{pair.folder}: its tokenizer has no mask token, so nothing can be masked")
    masked = choose_masked(windows, set(tokenizer.all_special_ids))
    reference = None if pair.reference is None else pair.load_reference()
    both = fill_in(pair.load(), windows, masked, tokenizer.mask_token_id, reference)
    if not isinstance(both, TokenComparison):
        return MaskedResult(pair.name, both)
    return MaskedResult(pair.name, both.score, pair.reference_name, both.reference_score, both.kl, both.top1_agreement)


def _compare_sentences(
    pair: Pair, base: Path, tokenizer: PreTrainedTokenizerBase, options: EvaluationOptions
) -> ComparisonResult:
    """Compare embeddings of the lines of a text."""
    assert options.window is not None
    if not read_modules(base):
        raise UserError(
            f"{pair.folder} is a sentence-transformers folder and {base} is not (it has no {MODULES}): what "
            "they give for a text cannot be compared"
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"{pair.folder}: its tokenizer has no padding token, so texts cannot be read together")
    lines = [line.strip() for line in read_text(options.text, tokenizer).split("\n")]
    texts = [line for line in lines if line][: options.samples]
    model = SentenceModel(pair.load(), pair.folder, tokenizer)
    reference = SentenceModel(pair.load_reference(), base, tokenizer)
    comparison = compare_sentences(model, reference, texts, options.window)
    return ComparisonResult(pair.name, pair.reference_name or base, comparison)
