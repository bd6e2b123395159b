"""Conversations with images, as a vision language model is called with them, in windows of equal length."""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ckpt_prune.checkpoint.files import Stamp, read_unchanged
from ckpt_prune.common.errors import NoneLeftError, UserError, one_line
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.common.similar_names import ask_for_sibling
from ckpt_prune.common.text_encoding import check_unicode, parse_json_rows
from ckpt_prune.measure.samples.conversations import write_messages
from ckpt_prune.measure.samples.image_files import describe_error
from ckpt_prune.measure.samples.image_processor import load_processor, refuse_without_torchvision
from ckpt_prune.measure.samples.images import decode_image
from ckpt_prune.measure.samples.samples import ScoredWindows
from ckpt_prune.measure.samples.text import check_vocabulary, fingerprint_windows, read_content, tokenizer_of

if TYPE_CHECKING:
    from ckpt_prune.checkpoint.checkpoint import Checkpoint

_PLACES = ("path", "image", "url")
"""Keys under which templates' messages name an image."""
_FORM = (
    '{"messages": [{"role": "user", "content": [{"type": "image", "path": "FILE"}, {"type": "text", "text": "…"}]}, …]}'
)


@dataclass(frozen=True)
class Talk:
    """A row: a conversation, its images in the order in which its messages have them, and where it stands."""

    where: str
    messages: list[dict[str, Any]]
    images: tuple[Path, ...]


@dataclass(frozen=True)
class _Written:
    """A row as tokens.

    Attributes:
        text: by the chat template, with a mark for each image.
        tokens: what the processor makes of it that has one number a token: name → (T,).
        needed: tokens up to the last of an image, or the first of an answer; 0 without images.
    """

    text: str
    images: tuple[Path, ...]
    tokens: dict[str, Tensor]
    needed: int

    def __len__(self) -> int:
        return len(self.tokens["input_ids"])


def read_talks(file: Path) -> list[Talk]:
    """Read rows of conversations with images; UserError if one has another form, or names an image that is not there.

    An image is named relative to the file.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file of rows with images{ask_for_sibling(file)}")
    talks = [_read_talk(where, row, file.parent) for where, row in parse_json_rows(file, read_content(file))]
    if not any(talk.images for talk in talks):
        raise UserError(f"{file}: no row has an image; each is {_FORM}, and text alone goes with --text")
    return talks


def _read_talk(where: str, row: Any, folder: Path) -> Talk:
    given = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: no messages; each row must be {_FORM}")
    messages, images = [], list[Path]()
    for number, message in enumerate(given, start=1):
        place = f"{where}, message {number}"
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str | list) or not content:
            raise UserError(f"{place}: a message must be an object with a role and its content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages.append({"role": role, "content": [_read_part(place, part, folder, images) for part in parts]})
    return Talk(where, messages, tuple(images))


def _read_part(place: str, part: Any, folder: Path, images: list[Path]) -> dict[str, str]:
    """Return a part of a message as templates take it, and add its image to `images`."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        check_unicode(place, text)
        return {"type": "text", "text": text}
    named = next((part[key] for key in _PLACES if key in part), None) if kind == "image" else None
    if not isinstance(named, str):
        raise UserError(f'{place}: a part must be {{"type": "text", "text": "…"}} or {{"type": "image", "path": "…"}}')
    if not (folder / named).is_file():
        raise UserError(f"{place}: no image {folder / named}; images are files, named relative to the file of rows")
    images.append(folder / named)
    return {"type": "image"}


class Reader:
    """The processor of a vision language model: its chat template, tokenizer and image processor.

    Images go through transformers' Pillow implementation, as everywhere here. Videos and code of its own are left out.
    """

    def __init__(self, checkpoint: "Checkpoint", *, trust: bool) -> None:
        # It loads all that loads models.
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        folder, model_type = checkpoint.path, str(checkpoint.config["model_type"])
        images, tokenizer = load_processor(folder, trust_remote_code=trust), tokenizer_of(checkpoint)
        name = PROCESSOR_MAPPING_NAMES.get(model_type)
        try:
            stock: Any = getattr(transformers, str(name))
            settings, _ = stock.get_processor_dict(folder, local_files_only=True)
            given = {"image_processor": images, "tokenizer": tokenizer}
            arguments = [given.get(attribute) for attribute in stock.get_attributes()]
            self.processor: Any = _without_missing(stock).from_args_and_dict(arguments, settings)
        except Exception as error:  # transformers raises anything here
            refuse_without_torchvision(folder, "processor of images with text", error)
            raise UserError(f"{folder}: its processor of images with text does not load: {one_line(error)}") from error
        self.tokenizer = tokenizer
        self.asks = "suffix" in signature(self.processor.__call__).parameters
        """Whether a row is a question, all of whose tokens attend to each other, and its answer (PaliGemma)."""
        template = self.processor.chat_template or tokenizer.chat_template
        self._template = str((template.get("default") if isinstance(template, dict) else template) or "")
        if not self._template and not self.asks:
            raise UserError(
                f"{folder} has no chat template: put the chat_template.jinja of the model's chat version into it"
            )
        ids = [each for each in self.processor.image_token_ids if each is not None]
        config = checkpoint.config
        keys = ("image_token_id", "image_token_index")
        self.image_tokens = {*ids, *(config[key] for key in keys if isinstance(config.get(key), int))}
        """Ids of tokens in whose place the model puts what it makes of images."""

    def write(self, talk: Talk, *, images: bool = True) -> _Written:
        """Write out a row, with its images or as if it had none."""
        messages = talk.messages
        if not images:
            kept = [[part for part in message["content"] if part["type"] == "text"] for message in messages]
            messages = [message | {"content": own} for message, own in zip(messages, kept, strict=True) if own]
        files = talk.images if images else ()
        if self.asks:
            text, answer = _read_question(talk, self.processor.image_token)
            inputs = self.call(text, files, {}, talk.where, suffix=[answer])
        else:
            text = write_messages(talk.where, messages, self.tokenizer, self._template)
            inputs = self.call(text, files, {}, talk.where)
        shape = inputs["input_ids"].shape
        tokens = {name: values[0] for name, values in inputs.items() if values.shape == shape}
        ids = tokens["input_ids"]
        places = torch.isin(ids, torch.tensor(sorted(self.image_tokens))).nonzero()
        if (len(places) and not files) or not len(ids):
            content = "a token that stands for an image" if len(ids) else "no token"
            raise UserError(f"{talk.where}: its text holds {content}")
        places = tokens["token_type_ids"].nonzero()[:1] if self.asks else places
        return _Written(text, files, tokens, int(places[-1]) + 1 if len(places) else 0)

    def call(
        self, text: str, images: Sequence[Path], stamps: dict[Path, Stamp], where: str, **more: list[str]
    ) -> dict[str, Tensor]:
        """Return what the processor makes of a text with images, as the model takes it; `more` are its arguments."""
        decoded = []
        for path in images:
            try:
                decoded.append(decode_image(read_unchanged(path, stamps)))
            except UserError:
                raise
            except Exception as error:  # Pillow's decoders raise anything
                raise UserError(f"{path} does not decode: {describe_error(error)}") from error
        bos = self.tokenizer.bos_token
        try:  # as transformers calls it: a template may have written the token that opens a text
            with warnings.catch_warnings(action="ignore"):  # of numpy's next versions
                outputs = self.processor(
                    text=[text],
                    images=[decoded] if decoded else None,
                    return_tensors="pt",
                    add_special_tokens=not (bos and text.startswith(bos)),
                    padding=False,
                    truncation=False,
                    **more,
                )
        except Exception as error:  # whatever a processor raises
            raise UserError(f"{where}: the model's processor does not take it: {one_line(error)}") from error
        return {name: values for name, values in outputs.items() if name not in ("attention_mask", "labels")}


def _read_question(talk: Talk, mark: str) -> tuple[str, str]:
    """Return a user's message with a mark for each image before its text, and the answer."""
    texts = ["".join(part.get("text", "") for part in message["content"]) for message in talk.messages]
    if [message["role"] == "user" for message in talk.messages] != [True, False] or not talk.images or not texts[1]:
        raise UserError(
            f"{talk.where}: this model answers one question: a row has a user's message with an image, and one with "
            'the answer ({"role": "assistant", "content": "…"})'
        )
    return mark * len(talk.images) + texts[0], texts[1]


def _without_missing(stock: Any) -> Any:
    """Return a class of processor that does without what reads videos or sounds."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else stock.check_argument_for_proper_class(self, name, argument)

    return type(stock.__name__, (stock,), {"check_argument_for_proper_class": check})


@dataclass(frozen=True, eq=False)
class ImageTextWindows(ScoredWindows):
    """Windows of conversations with their images.

    Rows follow each other, cut at the window's end where this cuts no image. Where the next row's images do not fit,
    text of rows without their images fills the window. Images are read anew whenever they are asked for.

    Attributes:
        scored: tokens of text, of a question with its answer those of the answer.
        rows: of each window, those that have images in it, in turn.
        tokens_of: further numbers of tokens that the model is passed, (N, T) each.
        lengths: tokens of each window before padding, which is behind all that attend to others; None if there is none.
    """

    reader: Any = None
    rows: tuple[tuple[_Written, ...], ...] = ()
    tokens_of: dict[str, Tensor] = field(default_factory=dict)
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    lengths: Tensor | None = None

    def counted(self, rows: slice) -> Tensor | None:
        """Return which tokens of the hidden states are no padding, (B, T) bool; None for all."""
        return None if self.lengths is None else torch.arange(self.tokens) < self.lengths[rows, None]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids, the images' bytes and the settings of the image processor."""
        digest = hashlib.sha256(fingerprint_windows(self.windows).encode())
        for written in (written for own in self.rows for written in own):
            for path in written.images:
                digest.update(hashlib.sha256(read_unchanged(path, self.stamps)).digest())
        digest.update(self.reader.processor.image_processor.to_json_string().encode())
        return digest.hexdigest()

    def called_with(self, rows: slice) -> list[dict[str, Tensor]]:
        """Return what the whole model is called with, one window at a time."""
        return [self.whole_inputs(row) for row in range(*rows.indices(len(self)))]

    def whole_inputs(self, row: int) -> dict[str, Tensor]:
        """Return what the model with its vision tower is called with for one window."""
        one = slice(row, row + 1)
        inputs = {"input_ids": self.windows[one]} | {name: own[one] for name, own in self.tokens_of.items()}
        images = [path for written in self.rows[row] for path in written.images]
        if images:
            text = "".join(written.text for written in self.rows[row])
            outputs = self.reader.call(text, images, self.stamps, f"window {row}")
            shape = outputs["input_ids"].shape
            inputs |= {name: values for name, values in outputs.items() if values.shape != shape}
        return inputs


def pack_windows(
    reader: Reader, file: Path, *, samples: int | None, window: int, seed: int | None, skip: int = 0, config: Any
) -> ImageTextWindows:
    """Put rows into windows of equal length, as many as there are or are asked for.

    Args:
        seed: of the order of rows; None for that of the file.
        skip: pass over so many windows.
        config: of the model, whose embedding must have a row for every token.

    Raises:
        NoneLeftError: there are no other windows than those that are passed over.
    """
    talks = read_talks(file)
    if seed is not None:
        order = torch.randperm(len(talks), generator=torch.Generator().manual_seed(seed)).tolist()
        talks = [talks[place] for place in order]
    count = None if samples is None else skip + samples
    packed: list[tuple[dict[str, Tensor], tuple[_Written, ...]]] = []
    pack = _take_questions if reader.asks else _pack
    for made in track(pack(reader, talks, window), "images with text", unit="window", total=count):
        packed.append(made)
        if len(packed) == count:
            break
    if not packed:
        raise UserError(
            f"{file}: {plural(len(talks), 'row')} fill no window of {window} tokens: give more, or say a shorter "
            "--window"
        )
    if skip >= len(packed):
        raise NoneLeftError(f"{file} has {len(packed)} windows, and {skip} of them are taken; give more rows")
    packed = packed[skip:]
    lengths = torch.tensor([len(own["input_ids"]) for own, _ in packed])
    tokens = {name: pad_sequence([own[name] for own, _ in packed], batch_first=True) for name in packed[0][0]}
    windows = tokens.pop("input_ids")
    check_vocabulary(windows, config)
    scored = torch.isin(windows, torch.tensor(sorted(reader.image_tokens)), invert=True)
    if reader.asks:
        padding = torch.arange(windows.shape[1]) >= lengths[:, None]
        scored = (tokens["token_type_ids"] == 1) & ~padding
        tokens["token_type_ids"] = tokens["token_type_ids"] | padding.long()  # of no question
    images = sum(len(written.images) for _, own in packed for written in own)
    origin = f"{len(windows)} of {file.name} with {plural(images, 'image')}"
    rows = tuple(own for _, own in packed)
    return ImageTextWindows(windows, origin, scored, reader, rows, tokens, lengths=lengths if reader.asks else None)


def _take_questions(
    reader: Reader, talks: Sequence[Talk], window: int
) -> Iterator[tuple[dict[str, Tensor], tuple[_Written, ...]]]:
    """Yield rows one by one as `_pack` yields windows: a question's tokens attend to no others."""
    for talk in (talk for talk in talks if talk.images):
        written = reader.write(talk)
        _check_length(talk, written, window, "question")
        yield {name: own[:window] for name, own in written.tokens.items()}, (written,)


def _check_length(talk: Talk, written: _Written, window: int, last: str = "last image") -> None:
    """Refuse a row whose images, or whose question, do not fit into a window."""
    if written.needed > window:
        raise UserError(
            f"{talk.where}: it takes {written.needed} tokens up to the end of its {last}, and a "
            f"window has {window}: say a longer --window, or leave the row out"
        )


def _pack(
    reader: Reader, talks: Sequence[Talk], window: int
) -> Iterator[tuple[dict[str, Tensor], tuple[_Written, ...]]]:
    """Yield windows: name → (window,), and the rows with images in each."""
    place = 0
    while place < len(talks):
        parts, rows, length = list[_Written](), list[_Written](), 0
        while length < window and place < len(talks):
            written = reader.write(talks[place])
            _check_length(talks[place], written, window)
            if length + written.needed > window:
                break  # it opens the next window
            place += 1
            parts.append(written)
            rows += [written] * bool(written.images)
            length += len(written)
        others = cycle([*talks[place:], *talks[:place]])
        while length < window and place < len(talks):
            parts.append(reader.write(next(others), images=False))
            length += len(parts[-1])
        if length >= window:
            yield (
                {name: torch.cat([part.tokens[name] for part in parts])[:window] for name in parts[0].tokens},
                tuple(rows),
            )
