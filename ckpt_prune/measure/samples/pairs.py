"""Pairs of a source and its target, as an encoder-decoder is called with them in training."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ckpt_prune.common.errors import NoneLeftError, UserError, one_line
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.common.similar_names import ask_for_sibling
from ckpt_prune.common.text_encoding import check_unicode, parse_json_rows
from ckpt_prune.measure.samples.audio import SUFFIXES, AudioSamples
from ckpt_prune.measure.samples.samples import ScoredWindows
from ckpt_prune.measure.samples.text import check_vocabulary, fingerprint_windows, read_content, tokenizer_of
from ckpt_prune.model.composites import shipped_composite
from ckpt_prune.model.skeleton import build_skeleton, parse_config

if TYPE_CHECKING:
    from ckpt_prune.checkpoint.checkpoint import Checkpoint

_FORM = '{"source": "…", "target": "…"}'
_AUDIO_FORM = '{"audio": "FILE", "text": "…"}'
_SPOKEN = "language"
_UNSCORED = -100
"""The label of what no loss counts, in transformers."""
_LANGUAGES = {"source_language": "src_lang", "target_language": "tgt_lang"}
"""Key of a row → attribute of a tokenizer of several languages."""


@dataclass(frozen=True)
class Pair:
    """A row: a source, text or a file of sound, and its target, perhaps their languages, and where it stands."""

    where: str
    source: str | Path
    target: str
    languages: dict[str, str] = field(default_factory=dict)


def reads_pairs(model: str | Path, *, audio: bool = False) -> str:
    """Return the error for someone who gives an encoder-decoder other data."""
    return f"{model} reads {'audio with its text' if audio else 'pairs of a source and its target'}: give --data FILE"


def read_pairs(file: Path, *, audio: bool = False) -> list[Pair]:
    """Read rows of texts with their targets, or of audio with its text; UserError if one has another form.

    A sound is named relative to the file.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file of pairs{ask_for_sibling(file)}")
    rows = parse_json_rows(file, read_content(file))
    pairs = [_read_sound(where, row, file.parent) if audio else _read_pair(where, row) for where, row in rows]
    if not pairs:
        raise UserError(f"{file}: no pairs in it; each row is {_AUDIO_FORM if audio else _FORM}")
    return pairs


def _read_sound(where: str, row: Any, folder: Path) -> Pair:
    named, text = (row.get(key) if isinstance(row, dict) else None for key in ("audio", "text"))
    if not isinstance(named, str) or not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: no audio with its text; each row must be {_AUDIO_FORM}")
    check_unicode(where, text)
    path = folder / named
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"{where}: no sound {path}; sounds are {' '.join(SUFFIXES)}, named relative to the file of rows"
        )
    language = row.get(_SPOKEN)
    if language is not None and not isinstance(language, str):
        raise UserError(f"{where}: {_SPOKEN} {language!r} is no code of a language")
    return Pair(where, path, text, {} if language is None else {_SPOKEN: language})


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
    """A pair as tokens: those of the source, (S,), none of a sound, and the labels, (L,), int64 each."""

    source: Tensor
    labels: Tensor


class PairReader:
    """Tokenizer and class of an encoder-decoder.

    The tokenizer's own template writes source and target, with the tokens of their languages. The class itself makes
    of the target's tokens what the decoder reads.
    """

    def __init__(self, checkpoint: "Checkpoint", window: int | None) -> None:
        self.window, self.folder = window, checkpoint.path
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
                    f"{pair.where}: the tokenizer of {self.folder} writes a token for the language, and no {key} says "
                    f'which: add "{key}": "CODE" to the rows'
                )
            if attribute in pair.languages and not hasattr(tokenizer, attribute):
                raise UserError(f"{pair.where}: the tokenizer of {self.folder} knows no languages")
            if language is not None and getattr(tokenizer, attribute) != language:
                try:
                    setattr(tokenizer, attribute, language)
                except Exception as error:  # KeyError and others, as each tokenizer does
                    raise UserError(
                        f"{pair.where}: the tokenizer of {self.folder} has no language {language!r}"
                    ) from error
        if _SPOKEN in pair.languages:
            self._say_spoken(pair)
        window, cut = self.window, {"truncation": self.window is not None, "verbose": False}
        source: list[int] = []
        try:
            if isinstance(pair.source, str):
                source = tokenizer(text=pair.source, max_length=window, **cut)["input_ids"]
            labels = tokenizer(text_target=pair.target, max_length=window and window - 1, **cut)["input_ids"]
        except Exception as error:  # whatever a tokenizer raises
            raise UserError(f"{pair.where}: the tokenizer does not take it: {one_line(error)}") from error
        if self.audio and labels and labels[0] == self.config.decoder_start_token_id:
            labels = labels[1:]  # the class puts it before labels
        if not (source or self.audio) or not labels:
            raise UserError(f"{pair.where}: its {'source' if not source else 'target'} holds no token")
        return _Written(torch.tensor(source), torch.tensor(labels))

    def _say_spoken(self, pair: Pair) -> None:
        """Let the tokenizer write the token of a sound's language, and that its text is said in it."""
        try:
            self.tokenizer.set_prefix_tokens(language=pair.languages[_SPOKEN], task="transcribe")
        except Exception as error:  # ValueError of Whisper's; AttributeError of any other
            raise UserError(
                f"{pair.where}: the tokenizer of {self.folder} has no language {pair.languages[_SPOKEN]!r}"
            ) from error

    @property
    def audio(self) -> bool:
        """Whether sources are sounds."""
        return str(self._model.main_input_name) == "input_features"

    def sounds(self, paths: list[Path]) -> AudioSamples:
        """Return the features of sounds, read when they are asked for."""
        config = self.config
        shape = {"channels": config.num_mel_bins, "frames": 2 * config.max_source_positions}
        return AudioSamples(paths, self.folder, **shape, tokens=config.max_source_positions)

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
                f"{self.folder}: config.json does not say how targets begin (decoder_start_token_id, pad_token_id): "
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
        sounds: what the encoder is passed in place of `sources`, if it hears.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    stack: Literal["encoder", "decoder"] = "decoder"
    sounds: AudioSamples | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the longest sample in the stack."""
        return self.longest if self.stack == "encoder" else int(self.windows.shape[1])

    @property
    def longest(self) -> int:
        """Tokens of the longest source; those that the encoder makes of a sound."""
        return int(self.sources["input_ids"].shape[1]) if self.sounds is None else self.sounds.tokens

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids of sources and targets."""
        parts = [fingerprint_windows(each) for each in (*self.sources.values(), self.windows)]
        parts += [] if self.sounds is None else [self.sounds.fingerprint]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def batch(self, rows: slice) -> dict[str, Tensor]:
        if self.sounds is not None:
            return self.sounds.batch(rows) | {"decoder_input_ids": self.windows[rows]}
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
    pairs = read_pairs(file, audio=reader.audio)
    if seed is not None:
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
        pairs = [pairs[place] for place in order]
    if skip >= len(pairs):
        raise NoneLeftError(f"{file} has {plural(len(pairs), 'pair')}, and {skip} of them are taken; give more rows")
    pairs = pairs[skip : None if samples is None else skip + samples]
    written = [reader.write(pair) for pair in track(pairs, "pairs", unit="pair", total=len(pairs))]
    windows = _pad(reader, written, stack, f"{plural(len(pairs), 'pair')} of {file.name}")
    paths = [pair.source for pair in pairs if isinstance(pair.source, Path)]
    return replace(windows, sources={}, sounds=reader.sounds(paths)) if paths else windows


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
