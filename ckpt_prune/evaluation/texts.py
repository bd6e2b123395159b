"""Measuring a model of text: perplexity, masked tokens, predictions, embeddings or features, whichever it gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.sentence_modules import MODULES, read_modules, read_ranked_tokens
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_windows
from ckpt_prune.evaluation.bits import TextPiece, compare_bits, cut_pieces, fast_tokenizer
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.heads import compare_heads
from ckpt_prune.evaluation.masked import choose_masked, fill_in
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.perplexity import TokenComparison, compare, perplexity, self_noise
from ckpt_prune.evaluation.purpose import (
    LABELLED,
    check_folder,
    check_same_kind,
    check_same_tokenizer,
    has_other_tokenizer,
    is_vision,
    reference_of_base,
)
from ckpt_prune.evaluation.quality import SAME_KL
from ckpt_prune.evaluation.results import ComparisonResult, ScoredResult, TextsResult
from ckpt_prune.evaluation.sentences import compare_sentences, cut_texts, open_embedder
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.evaluation.whole_model import auto_class, config_of, purpose_of_folder, read_config
from ckpt_prune.measure.samples.image_text import Reader, pack_windows
from ckpt_prune.measure.samples.pairs import PairReader, PairWindows, choose_pairs
from ckpt_prune.measure.samples.samples import ScoredWindows, TokenWindows
from ckpt_prune.measure.samples.text import (
    add_frame,
    count_frame_tokens,
    cut_windows,
    load_tokenizer,
    read_text,
    tokenise_text,
)
from ckpt_prune.model.context import context_length
from ckpt_prune.model.purposes import WITHOUT_HEAD, refuse_text_of
from ckpt_prune.options.data import EvaluationOptions

TextResult = ScoredResult[Any] | ComparisonResult


@dataclass(frozen=True)
class _Lines:
    """Lines of a text, each cut to `window` tokens when it is embedded."""

    texts: list[str]
    window: int


def measure_texts(pair: Pair, options: EvaluationOptions, given: Tensor | None = None) -> TextResult | TextsResult:
    """Measure a model of text on each of the texts by itself, and compare it with its reference.

    All texts are read before the first is measured.

    Args:
        pair: both of them.
        options: the texts, and how they are cut into windows.
        given: windows in place of those of the texts, int64 (N, T), within the frame of an encoder's tokenizer.
    """
    folder = pair.folder
    for path in pair.folders:
        check_folder(path)
        if is_vision(path):
            raise UserError(f"{path} is a vision model: --text does not go with it; measure it with --images")
    check_same_kind(folder, pair.reference)
    purpose = purpose_of_folder(folder)
    base = reference_of_base(folder, pair.reference) if purpose in WITHOUT_HEAD else None
    if purpose in LABELLED and pair.reference is None:
        raise UserError(
            f"{folder} is for {purpose}, and nothing here says what is right: compare it with --against MODEL2"
        )
    refuse_text_of(folder, purpose)
    generates = purpose in ("text-generation", "image-text-to-text")
    if not generates and purpose not in ("fill-mask", *LABELLED, *WITHOUT_HEAD):
        auto = auto_class(read_config(folder)).removeprefix("AutoModelFor")
        raise UserError(f"{folder} is a {auto} model, which evaluate does not measure")
    tokenizer = load_tokenizer(folder)
    read: Callable[..., Any] = read_windows
    measure: Callable[..., TextResult] = _measure_perplexity
    if not generates:
        read, measure = _read_framed_windows, _measure_masked if purpose == "fill-mask" else _compare_outputs
    if base is not None and read_modules(folder):
        _check_sentences(pair, base, tokenizer)
        read, measure = _read_lines, _compare_sentences
    if has_other_tokenizer(folder, pair.reference):
        if generates:
            return _measure_in_bits(pair, tokenizer, options, given)
        if measure is not _compare_sentences:
            check_same_tokenizer(folder, pair.reference)
    if given is not None:
        pieces = measure is _compare_sentences
        return measure(pair, tokenizer, _Lines(cut_texts(given, tokenizer), given.shape[1]) if pieces else given)
    readings = [read(text, tokenizer, options) for text in options.text]
    results = [measure(pair, tokenizer, reading) for reading in readings]
    return _join(options, results)


def measure_rows(pair: Pair, options: EvaluationOptions, given: ScoredWindows | None = None) -> ScoredResult[Any]:
    """Measure a vision language model on the text of conversations with images, an encoder-decoder on targets.

    Args:
        pair: the model, and perhaps a reference, with which it is compared.
        options: the rows of conversations, or of sources with their targets, and the window.
        given: windows in place of those of the rows.
    """
    check_same_kind(pair.folder, pair.reference)
    purpose = purpose_of_folder(pair.folder)
    if purpose not in ("image-text-to-text", "text2text-generation", "automatic-speech-recognition"):
        raise UserError(
            f"{pair.folder} is no vision language model and no encoder-decoder: --data does not go with it; measure it "
            "on --text"
        )
    if given is None:
        given = (_read_talks if purpose == "image-text-to-text" else _read_pairs)(pair, options)
    models = [pair.load(), *([] if pair.reference is None else [pair.load_reference()])]
    on = given.origin if isinstance(given, PairWindows) else None
    if len(models) == 1:
        return ScoredResult(pair.name, perplexity(models[0], given), on=on)
    return replace(_pair_scores(pair, compare(models[0], models[1], given)), on=on)


def _read_talks(pair: Pair, options: EvaluationOptions) -> ScoredWindows:
    assert options.data is not None
    if options.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
    return pack_windows(
        Reader(Checkpoint.open(str(pair.folder), packed=True), trust=pair.trust),
        options.data,
        samples=options.samples,
        window=options.window,
        seed=None,
        config=config_of(pair.folder),
    )


def _read_pairs(pair: Pair, options: EvaluationOptions) -> ScoredWindows:
    assert options.data is not None
    check_same_tokenizer(pair.folder, pair.reference)
    window = options.window or context_length(config_of(pair.folder))
    reader = PairReader(Checkpoint.open(str(pair.folder), packed=True), window)
    return choose_pairs(reader, options.data, "decoder", samples=options.samples, seed=None)


def _join(options: EvaluationOptions, results: Sequence[TextResult]) -> TextResult | TextsResult:
    return results[0] if len(results) == 1 else TextsResult(tuple(zip(options.text, results, strict=True)))


def _measure_in_bits(
    pair: Pair, tokenizer: PreTrainedTokenizerBase, options: EvaluationOptions, given: Tensor | None
) -> TextResult | TextsResult:
    """Measure two causal language models with other tokenizers than each other's, in bits per byte.

    Args:
        given: windows of the model's own tokens, whose texts are measured in place of those of `options`.
    """
    assert pair.reference is not None
    others = load_tokenizer(pair.reference)
    tokenizers = [fast_tokenizer(*each) for each in ((tokenizer, pair.folder), (others, pair.reference))]
    models = pair.open_text_models()
    if given is not None:
        readings = [[TextPiece.of(text) for text in cut_texts(given, tokenizer) if text.strip()]]
    else:
        assert options.window is not None
        texts = [read_text([text], tokenizer) for text in options.text]
        readings = [cut_pieces(text, tokenizers, options.window, options.samples) for text in texts]
    results = []
    for pieces in readings:
        both = compare_bits(models, tokenizers, pieces)
        scores = both.score, pair.reference_name, both.reference_score
        results.append(ScoredResult(pair.name, *scores, both.kl, both.top1_agreement))
    return _join(options, results)


def read_windows(text: Path, tokenizer: PreTrainedTokenizerBase, options: EvaluationOptions) -> Tensor:
    """Return the windows of a text that a causal language model is measured on, int64 (windows, window)."""
    assert options.window is not None
    stream = tokenise_text(tokenizer, read_text([text], tokenizer), bos=options.bos)
    return cut_windows(stream, window=options.window, limit=options.samples)


def _read_framed_windows(text: Path, tokenizer: PreTrainedTokenizerBase, options: EvaluationOptions) -> Tensor:
    assert options.window is not None
    frame = count_frame_tokens(tokenizer)
    if options.window < frame + 2:
        raise UserError(f"--window {options.window} is too short: the tokenizer adds {frame} tokens of its own")
    stream = tokenise_text(tokenizer, read_text([text], tokenizer), bos="never")
    windows = cut_windows(stream, window=options.window, limit=options.samples, frame=frame)
    return add_frame(windows, tokenizer)


def _measure_perplexity(pair: Pair, _tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> TextResult:
    models = pair.open_text_models()
    if pair.foresee is not None:
        pair.foresee([each for each in models if isinstance(each, StreamedModel)], *windows.shape)
    if len(models) == 1:
        return ScoredResult(pair.name, perplexity(models[0], windows))
    both, reference = compare(models[0], models[1], windows), models[1]
    result = _pair_scores(pair, both)
    if pair.tells_noise and both.kl < SAME_KL and isinstance(reference, StreamedModel):
        return replace(result, self_noise=self_noise(reference, windows))
    return result


def _pair_scores(pair: Pair, both: TokenComparison) -> ScoredResult[Any]:
    scores = both.score, pair.reference_name, both.reference_score
    return ScoredResult(pair.name, *scores, both.kl, both.top1_agreement, spread=both.spread)


def _compare_outputs(pair: Pair, _tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> ComparisonResult:
    """Compare the predictions of heads, or the features of models without one."""
    assert pair.reference_name is not None
    model, reference = pair.load(), pair.load_reference()
    purpose = purpose_of_folder(pair.folder)
    if purpose in LABELLED:
        ranked = read_ranked_tokens(pair.folder) if purpose == "text-ranking" else None
        per_token = purpose == "token-classification"
        predictions = compare_heads(model, reference, windows, per_token=per_token, ranked=ranked)
        return ComparisonResult(pair.name, pair.reference_name, predictions)
    for each in (model, reference):
        check_windows(each, windows)
    features = compare_features(model, reference, TokenWindows(windows))
    return ComparisonResult(pair.name, pair.reference_name, features)


def _measure_masked(pair: Pair, tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> TextResult:
    if tokenizer.mask_token_id is None:
        raise UserError(f"{pair.folder}: its tokenizer has no mask token, so nothing can be masked")
    masked = choose_masked(windows, set(tokenizer.all_special_ids))
    reference = None if pair.reference is None else pair.load_reference()
    both = fill_in(pair.load(), windows, masked, tokenizer.mask_token_id, reference)
    return _pair_scores(pair, both) if isinstance(both, TokenComparison) else ScoredResult(pair.name, both)


def _check_sentences(pair: Pair, base: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse embedders whose embeddings cannot be compared."""
    if not read_modules(base):
        raise UserError(
            f"{pair.folder} is a sentence-transformers folder and {base} is not (it has no {MODULES}): what "
            "they give for a text cannot be compared"
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"{pair.folder}: its tokenizer has no padding token, so texts cannot be read together")


def _read_lines(text: Path, tokenizer: PreTrainedTokenizerBase, options: EvaluationOptions) -> _Lines:
    assert options.window is not None
    lines = [line.strip() for line in read_text([text], tokenizer).split("\n")]
    return _Lines([line for line in lines if line][: options.samples], options.window)


def _compare_sentences(pair: Pair, tokenizer: PreTrainedTokenizerBase, lines: _Lines) -> ComparisonResult:
    """Compare embeddings of the lines of a text."""
    assert pair.reference is not None
    assert pair.reference_name is not None
    model = open_embedder(pair.load(), pair.folder, tokenizer)
    reference = open_embedder(pair.load_reference(), pair.reference, load_tokenizer(pair.reference))
    comparison = compare_sentences(model, reference, lines.texts, lines.window)
    return ComparisonResult(pair.name, pair.reference_name, comparison)
