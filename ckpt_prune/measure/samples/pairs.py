"""Pairs of a source and its target, as an encoder-decoder is called with them in training."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ckpt_prune.common.errors import NoneLeftError, UserError, one_line
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.common.text_encoding import check_unicode, parse_json_rows
from ckpt_prune.measure.samples.samples import ScoredWindows
from ckpt_prune.measure.samples.text import check_vocabulary, fingerprint_windows, read_content, tokenizer_of
from ckpt_prune.model.composites import shipped_composite
from ckpt_prune.model.skeleton import build_skeleton, parse_config

if TYPE_CHECKING:
    from ckpt_prune.checkpoint.checkpoint import Checkpoint

_FORM = '{"source": "…", "target": "…"}'
_UNSCORED = -100
"""The label of what no loss counts, in transformers."""
_LANGUAGES = {"source_language": "src_lang", "target_language": "tgt_lang"}
"""Key of a row → attribute of a tokenizer of several languages."""


@dataclass(frozen=True)
class Pair:
    """A row: a source and its target, perhaps their languages, and where it stands."""

    where: str
    source: str
    target: str
    languages: dict[str, str] = field(default_factory=dict)


def read_pairs(file: Path) -> list[Pair]:
    """Read rows of pairs; UserError if one has another form."""
    if not file.is_file():
        raise UserError(f"{file}: no such file of pairs")
    pairs = [_read_pair(where, row) for where, row in parse_json_rows(file, read_content(file))]
    if not pairs:
        raise UserError(f"{file}: no pairs in it; each row is {_FORM}")
    return pairs


def _read_pair(where: str, row: Any) -> Pair:
    texts = [row.get(key) if isinstance(row, dict) else None for key in ("source", "target")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{where}: no source with its target; each row must be {_FORM}")
    source, target = map(str, texts)
    named = {key: row[key] for key in _LANGUAGES if key in row}
    for key, language in named.items():
        if not isinstance(language, str):
            raise UserError(f"{where}: {key} {language!r} is no code of a language")
    check_unicode(where, source, target, *named.values())
    return Pair(where, source, target, {_LANGUAGES[key]: language for key, language in named.items()})


@dataclass(frozen=True)
class _Written:
    """A pair as tokens: those of the source, (S,), and the labels, (L,), int64 each."""

    source: Tensor
    labels: Tensor


class PairReader:
    """Tokenizer and class of an encoder-decoder.

    The tokenizer's own template writes source and target, with the tokens of their languages. The class itself makes
    of the target's tokens what the decoder reads.
    """

    def __init__(self, checkpoint: "Checkpoint", window: int | None) -> None:
        self.window, self._folder = window, checkpoint.path
        self.tokenizer: Any = tokenizer_of(checkpoint)
        self._usual = {name: getattr(self.tokenizer, name, None) for name in _LANGUAGES.values()}
        self.config: Any = parse_config(checkpoint.config)
        self._model: Any = build_skeleton(self.config, shipped_composite(self.config.model_type).architecture)

    def write(self, pair: Pair) -> _Written:
        """Write out a pair, the source cut to `window` tokens, the target to one less: a token stands before it."""
        tokenizer = self.tokenizer
        for attribute, usual in self._usual.items():
            language = pair.languages.get(attribute, usual)
            if hasattr(tokenizer, attribute) and language is None:
                key = next(key for key, name in _LANGUAGES.items() if name == attribute)
                raise UserError(
                    f"{pair.where}: the tokenizer of {self._folder} writes a token for the language, and no {key} says "
                    f'which: add "{key}": "CODE" to the rows'
                )
            if attribute in pair.languages and not hasattr(tokenizer, attribute):
                raise UserError(f"{pair.where}: the tokenizer of {self._folder} knows no languages")
            if language is not None and getattr(tokenizer, attribute) != language:
                try:
                    setattr(tokenizer, attribute, language)
                except Exception as error:  # KeyError and others, as each tokenizer does
                    raise UserError(
                        f"{pair.where}: the tokenizer of {self._folder} has no language {language!r}"
                    ) from error
        window, cut = self.window, {"truncation": self.window is not None, "verbose": False}
        try:
            source = tokenizer(text=pair.source, max_length=window, **cut)["input_ids"]
            labels = tokenizer(text_target=pair.target, max_length=window and window - 1, **cut)["input_ids"]
        except Exception as error:  # whatever a tokenizer raises
            raise UserError(f"{pair.where}: the tokenizer does not take it: {one_line(error)}") from error
        if not source or not labels:
            raise UserError(f"{pair.where}: its {'source' if not source else 'target'} holds no token")
        return _Written(torch.tensor(source), torch.tensor(labels))

    def shift(self, labels: Tensor) -> Tensor:
        """Return what the decoder reads where these labels, (N, T), are to be predicted."""
        prepare = getattr(self._model, "prepare_decoder_input_ids_from_labels", None)
        config = self.config
        try:
            if prepare is not None:
                shifted: Tensor = prepare(labels=labels)
            else:
                module: Any = import_module(type(self._model).__module__)
                shifted = module.shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
        except Exception as error:  # a config without its special tokens
            raise UserError(
                f"{self._folder}: config.json does not say how targets begin (decoder_start_token_id, pad_token_id): "
                f"{one_line(error)}"
            ) from error
        return shifted


@dataclass(frozen=True, eq=False)
class PairWindows(ScoredWindows):
    """Pairs, padded to the longest source and the longest target.

    Attributes:
        windows: what the decoder reads, and one token more, (N, T) int64: `windows[:, 1:]` are the labels.
        scored: tokens that a loss counts, (N, T) bool.
        sources: what the encoder is passed: name → (N, S, …).
        stack: the blocks that samples are of.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    stack: Literal["encoder", "decoder"] = "decoder"

    @property
    def tokens(self) -> int:
        """Tokens of the longest sample in the stack."""
        return int(self.sources["input_ids"].shape[1] if self.stack == "encoder" else self.windows.shape[1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids of sources and targets."""
        parts = [fingerprint_windows(each) for each in (*self.sources.values(), self.windows)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def batch(self, rows: slice) -> dict[str, Tensor]:
        return {name: each[rows] for name, each in self.sources.items()} | {"decoder_input_ids": self.windows[rows]}

    def called_with(self, rows: slice) -> list[dict[str, Tensor]]:
        """Return what the whole model is called with for these samples."""
        return [self.batch(rows)]

    def counted(self, rows: slice) -> Tensor:
        """Return which tokens of the stack are no padding, (rows, tokens) bool."""
        if self.stack == "encoder":
            return self.sources["attention_mask"][rows].bool()
        return self.scored[rows].roll(-1, 1)


def choose_pairs(
    reader: PairReader,
    file: Path,
    stack: Literal["encoder", "decoder"],
    *,
    samples: int | None,
    seed: int | None,
    skip: int = 0,
) -> PairWindows:
    """Choose pairs of a file, as many as there are or are asked for.

    Args:
        seed: of the order of rows; None for that of the file.
        skip: pass over so many.

    Raises:
        NoneLeftError: there are no other pairs than those that are passed over.
    """
    pairs = read_pairs(file)
    if seed is not None:
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
        pairs = [pairs[place] for place in order]
    if skip >= len(pairs):
        raise NoneLeftError(f"{file} has {plural(len(pairs), 'pair')}, and {skip} of them are taken; give more rows")
    pairs = pairs[skip : None if samples is None else skip + samples]
    written = [reader.write(pair) for pair in track(pairs, "pairs", unit="pair", total=len(pairs))]
    return _pad(reader, written, stack, f"{plural(len(pairs), 'pair')} of {file.name}")


def _pad(
    reader: PairReader, written: Sequence[_Written], stack: Literal["encoder", "decoder"], origin: str
) -> PairWindows:
    pad = reader.config.pad_token_id
    sources = pad_sequence([each.source for each in written], batch_first=True, padding_value=pad or 0)
    mask = pad_sequence([torch.ones_like(each.source) for each in written], batch_first=True)
    # One column more: the decoder then reads the last label, too, so that windows hold all of them.
    labels = pad_sequence(
        [torch.cat([each.labels, torch.tensor([_UNSCORED])]) for each in written],
        batch_first=True,
        padding_value=_UNSCORED,
    )
    windows = reader.shift(labels)
    scored = torch.zeros_like(windows, dtype=torch.bool)
    scored[:, 1:] = labels[:, :-1] != _UNSCORED
    for ids in (sources, windows):
        check_vocabulary(ids, reader.config)
    return PairWindows(windows, origin, scored, {"input_ids": sources, "attention_mask": mask}, stack)
