"""Measuring a model of text: perplexity, masked tokens, classes, embeddings or features, whichever it gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.architectures.purposes import WITHOUT_HEAD
from ckpt_prune.calibration.samples import TokenWindows
from ckpt_prune.calibration.text import (
    evaluation_windows,
    frame_length,
    framed,
    load_tokenizer,
    read_text,
    token_stream,
)
from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.checkpoint.sentence_modules import MODULES, read_modules, read_ranked_tokens
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_windows
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.heads import compare_heads
from ckpt_prune.evaluation.masked import TokenComparison, choose_masked, fill_in
from ckpt_prune.evaluation.perplexity import compare, perplexity
from ckpt_prune.evaluation.purpose import (
    LABELLED,
    check_folder,
    check_same_kind,
    is_vision,
    reference_of_base,
)
from ckpt_prune.evaluation.results import FeaturesResult, HeadResult, MaskedResult, PerplexityResult, SentencesResult
from ckpt_prune.evaluation.sentences import SentenceModel, compare_sentences
from ckpt_prune.evaluation.whole_model import auto_class, load_model, purpose_of_folder, read_config
from ckpt_prune.options import EvaluationOptions

TextResult = PerplexityResult | MaskedResult | FeaturesResult | SentencesResult | HeadResult


@dataclass(frozen=True)
class Pair:
    """A model, and the one it is held against.

    Attributes:
        folder: the model's.
        reference: the other's, or None.
        device: where both run.
        trust: run code that a folder brings.
        graph: the model's ONNX graph, where it is one; the folder is the one that it lies in.
        reference_graph: the same of the other.
        open_graph: opens a graph as what is called like a model. It is another room's.
        keeps: hold each model once it is loaded, because several measurements follow.
    """

    folder: Path
    reference: Path | None
    device: torch.device
    trust: bool
    graph: Path | None = None
    reference_graph: Path | None = None
    open_graph: Callable[[Path], PreTrainedModel] | None = None
    keeps: bool = False
    _kept: dict[Path, PreTrainedModel] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> Path:
        """The model, as results name it."""
        return self.graph or self.folder

    @property
    def reference_name(self) -> Path | None:
        """The other, as results name it."""
        return self.reference_graph or self.reference

    def load(self) -> PreTrainedModel:
        """The model, WHOLE.

        Raises:
            UserError: it does not load.
        """
        return self._opened(self.folder, self.graph)

    def load_reference(self) -> PreTrainedModel:
        """The other, WHOLE.

        Raises:
            UserError: it does not load.
        """
        assert self.reference is not None
        return self._opened(self.reference, self.reference_graph)

    def _opened(self, folder: Path, graph: Path | None) -> PreTrainedModel:
        place = graph or folder
        if place in self._kept:
            return self._kept[place]
        if graph is not None and self.open_graph is not None:
            model = self.open_graph(graph)
        else:
            model = load_model(folder, device=self.device, trust_remote_code=self.trust)
        if self.keeps:
            self._kept[place] = model
        return model


def measure_text(pair: Pair, options: EvaluationOptions) -> TextResult:
    """Measure a model of text.

    Raises:
        UserError: it reads no text, the two cannot be compared, or the window does not suit them.
    """
    folder, reference = pair.folder, pair.reference
    for path in (folder, reference):
        if path is not None:
            check_folder(path)
        if path is not None and is_vision(path):
            raise UserError(f"{path} is a vision model: --text does not go with it; measure it with --images")
    if reference is not None and tokenizer_fingerprint(folder) != tokenizer_fingerprint(reference):
        raise UserError(f"{folder} and {reference} have different tokenizers: their perplexities cannot be compared")
    check_same_kind(folder, reference)
    if purpose_of_folder(folder) in ("text-generation", "image-text-to-text"):
        return _perplexity(pair, options)
    return _encoder(pair, options)


def _perplexity(pair: Pair, options: EvaluationOptions) -> PerplexityResult:
    assert options.window is not None
    stream = token_stream(load_tokenizer(pair.folder), read_text(options.text), bos=options.bos)
    windows = evaluation_windows(stream, window=options.window, limit=options.samples)
    model = pair.load()
    if pair.reference is None:
        return PerplexityResult(pair.name, perplexity(model, windows))
    found = compare(model, pair.load_reference(), windows)
    return PerplexityResult(
        pair.name, found.score, pair.reference_name, found.reference_score, found.kl, found.top1_agreement
    )


def _encoder(pair: Pair, options: EvaluationOptions) -> TextResult:
    """Masked tokens where an encoder predicts them, what another head says, or embeddings or features without one."""
    assert options.window is not None
    purpose = purpose_of_folder(pair.folder)
    base = reference_of_base(pair.folder, pair.reference) if purpose in WITHOUT_HEAD else None
    if purpose in LABELLED and pair.reference is None:
        raise UserError(
            f"{pair.folder} is for {purpose}, and nothing here says what is right: compare it with --against MODEL2"
        )
    if purpose not in ("fill-mask", *LABELLED, *WITHOUT_HEAD):
        auto = auto_class(read_config(pair.folder)).removeprefix("AutoModelFor")
        raise UserError(f"{pair.folder} is a {auto} model, which evaluate does not measure")
    tokenizer = load_tokenizer(pair.folder)
    if base is not None and read_modules(pair.folder):
        return _sentences(pair, base, tokenizer, options)
    frame = frame_length(tokenizer)
    if options.window < frame + 2:
        raise UserError(f"--window {options.window} is too short: the tokenizer adds {frame} tokens of its own")
    stream = token_stream(tokenizer, read_text(options.text), bos="never")
    windows = evaluation_windows(stream, window=options.window, limit=options.samples, frame=frame)
    windows = framed(windows, tokenizer)
    if purpose in LABELLED:
        ranked = read_ranked_tokens(pair.folder) if purpose == "text-ranking" else None
        return _head(pair, windows, per_token=purpose == "token-classification", ranked=ranked)
    if base is None:
        return _masked(pair, tokenizer, windows)
    models = [pair.load(), pair.load_reference()]
    for each in models:
        check_windows(each, windows)
    return FeaturesResult(
        pair.name, pair.reference_name or base, compare_features(models[0], models[1], TokenWindows(windows))
    )


def _head(pair: Pair, windows: Tensor, *, per_token: bool, ranked: tuple[int, int | None] | None) -> HeadResult:
    assert pair.reference_name is not None
    found = compare_heads(pair.load(), pair.load_reference(), windows, per_token=per_token, ranked=ranked)
    return HeadResult(pair.name, pair.reference_name, found)


def _sentences(
    pair: Pair, base: Path, tokenizer: PreTrainedTokenizerBase, options: EvaluationOptions
) -> SentencesResult:
    """Embeddings of the lines of a text."""
    assert options.window is not None
    if not read_modules(base):
        raise UserError(
            f"{pair.folder} is a sentence-transformers folder and {base} is not (it has no {MODULES}): what "
            "they give for a text cannot be compared"
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"{pair.folder}: its tokenizer has no padding token, so texts cannot be read together")
    lines = [line.strip() for line in read_text(options.text).split("\n")]
    texts = [line for line in lines if line][: options.samples]
    models = [
        SentenceModel(model, path, tokenizer)
        for model, path in ((pair.load(), pair.folder), (pair.load_reference(), base))
    ]
    return SentencesResult(
        pair.name, pair.reference_name or base, compare_sentences(models[0], models[1], texts, options.window)
    )


def _masked(pair: Pair, tokenizer: PreTrainedTokenizerBase, windows: Tensor) -> MaskedResult:
    if tokenizer.mask_token_id is None:
        raise UserError(f"{pair.folder}: its tokenizer has no mask token, so nothing can be masked")
    masked = choose_masked(windows, set(tokenizer.all_special_ids))
    model = pair.load()
    other = None if pair.reference is None else pair.load_reference()
    found = fill_in(model, windows, masked, tokenizer.mask_token_id, other)
    if not isinstance(found, TokenComparison):
        return MaskedResult(pair.name, found)
    return MaskedResult(
        pair.name, found.score, pair.reference_name, found.reference_score, found.kl, found.top1_agreement
    )
