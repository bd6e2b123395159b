"""The size or loss that `frontier` is asked for, its samples of text, and the folder in which it makes candidates."""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ckpt_prune.checkpoint.folder_kinds import FRONTIER
from ckpt_prune.checkpoint.staging import Staging, check_output, partial_of
from ckpt_prune.common.formatting import decimal_bytes, plural
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.measure.samples.mixing import name_sources
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.samples.text import fingerprint_windows, load_tokenizer, mix_windows, read_text, tokenise_text
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.options.option import Options, digested_options
from ckpt_prune.recipe.sizes import Size, Timed, parse_size, parse_timed
from ckpt_prune.runner.estimate import estimate_frontier
from ckpt_prune.runner.frontier.record import USUAL_LOSS
from ckpt_prune.runner.pruning_budgets import will_prune_columns
from ckpt_prune.runner.resuming import NOTHING_BEGUN, resumable
from ckpt_prune.runner.vocabularies import parts_of_tokens

SAMPLES, WINDOW, HELD_OUT = 32, 512, 16
"""Windows that the model is measured on, and their tokens, by default, and windows that candidates are."""
INPUTS = ("model", "text", "images", "labels", "data")
"""Options that name what is read, and that commands which make a candidate have, too."""
RARE = 0.5
"""Windows are said to miss rare tokens if fewer tokens lengthen them by less than this share of what texts grow by."""
Read = TypeVar("Read", bound=Options)


def read_target(options: FrontierOptions, model: Model) -> tuple[int | None, float | None]:
    """Return the bytes that are asked for, or what may be lost: nats a token, or an energy if there is no head."""
    if options.target_bytes is None:
        loss = USUAL_LOSS if options.max_loss is None else float(options.max_loss)
        return None, math.log1p(loss) if model.family.gives_logits else 2 * loss
    dense = cost_of(model).bytes
    return parse_size("bytes", options.target_bytes).of(dense), None


def read_time(options: FrontierOptions) -> tuple[Size | None, Timed | None]:
    """Return the time that is asked for, and what it is of."""
    if options.target_latency is None:
        return None, None
    return parse_size("latency", options.target_latency), parse_timed(options.target_latency)


@dataclass(frozen=True)
class Texts:
    """The texts that a model is measured on, and those that its candidates are.

    Attributes:
        options: with the length of windows.
        samples: of the text that is fitted to.
        held_out: windows of the others, int64 (windows, tokens).
        names: of the text of each window, if there are several.
    """

    options: FrontierOptions
    samples: Samples
    held_out: Tensor
    names: list[str]

    @property
    def words(self) -> str:
        windows, length = self.held_out.shape
        return f"{windows} windows of {length} tokens of {', '.join(path.name for path in self.options.held_out)}"

    def parts(self, model: Model) -> dict[str, str]:
        """Return fingerprints of what a search depends on, besides its options, each under its name."""
        return {
            "model": model.checkpoint.fingerprint,
            "choice of samples": self.samples.fingerprint,
            "held-out text": fingerprint_windows(self.held_out),
        }


def read_texts(options: FrontierOptions, model: Model, say: Notices) -> Texts:
    """Refuse a place that cannot be written, and read both texts."""
    check_output(
        model.checkpoint.path, options.output, resume=options.resume, overwrite=options.overwrite,
        inputs=options.text, kind=FRONTIER,
    )  # fmt: skip
    options = options.model_copy(update={"window": options.window or min(WINDOW, model.tokens)})
    samples = choose_samples(model, options, trust=options.trust_remote_code, most=SAMPLES, say=say)
    return Texts(options, samples, *read_held_out(options, model))


def read_held_out(options: FrontierOptions, model: Model) -> tuple[Tensor, list[str]]:
    """Return windows of the texts that are held out, and the name of each window's, if there are several."""
    streams, window = _read_streams(options, model), options.window or WINDOW
    samples = options.held_out_samples or HELD_OUT
    windows, counts = mix_windows(streams, samples=samples, window=window, seed=options.seed, choose="first")
    return windows, name_sources(options.held_out, counts)


def _read_streams(options: FrontierOptions, model: Model) -> list[Tensor]:
    """Return the tokens of each held-out text, (tokens,) int64."""
    tokenizer = load_tokenizer(model.checkpoint.whole)
    return [tokenise_text(tokenizer, read_text([text], tokenizer), bos=options.bos) for text in options.held_out]


def words_of_rare_tokens(
    options: FrontierOptions, model: Model, kept: Sequence[int] | None, windows: Tensor
) -> list[str]:
    """Warn if the held-out texts have more of the dropped tokens than the windows that a loss was measured on.

    Args:
        kept: tokens that stay, rows of the embedding of `model`; None: all.
        windows: token ids, (windows, tokens) int64.

    Returns:
        A sentence, or none.
    """
    if kept is None:
        return []
    parts = parts_of_tokens(model, kept)

    def grow(tokens: Tensor) -> float:
        """Return how many tokens are added, as a share."""
        return sum(len(parts(token)) - 1 for token in tokens.flatten().tolist()) / max(1, tokens.numel())

    streams = _read_streams(options, model)
    of_texts, of_windows = sum(map(grow, streams)) / len(streams), grow(windows)
    if of_windows >= RARE * of_texts:
        return []
    return [
        f"Without the tokens that went, the held-out texts have {of_texts:.2%} more tokens, and the windows of them "
        f"that were measured {of_windows:.2%}: what fewer tokens lose is measured too low. More --held-out-samples "
        "tell it better."
    ]


@contextmanager
def open_staging(options: FrontierOptions, parts: Mapping[str, str], say: Notices) -> Iterator[Staging]:
    """Enter the folder in which candidates are made; what is done there is kept for `--resume`.

    Args:
        parts: fingerprints of what the search depends on, besides the options, each under its name.
    """
    asked = {f"--{name.replace('_', '-')}": json.dumps(value) for name, value in digested_options(options).items()}
    parts = {**parts, **asked}
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    with resumable(options.output, say):
        staging = Staging(
            options.output,
            job=digest,
            parts=parts,
            resume=options.resume,
            overwrite=options.overwrite,
            kind=FRONTIER,
        )
        if options.resume and not staging.resumed:
            say(NOTHING_BEGUN)
        if staging.resumed:
            done = plural(len(staging.journal.notes), "measurement")
            say(f"resuming {partial_of(options.output, FRONTIER).name}: {done} kept")
        with staging:
            staging.scratch.mkdir(exist_ok=True)
            yield staging


def foresee_work(
    options: FrontierOptions, model: Model, samples: Samples, steps: Sequence[str], files: int, limit: int | None
) -> None:
    """Say in which steps the work is done, the files being the last, and what it takes, unless it goes on."""
    if not _goes_on(options):
        prunes = will_prune_columns(model, limit, None)
        may_prune = any(", if " in step for step in steps)
        longer = "; longer where fewer bits lose much" if may_prune and not prunes else ""
        steps = [*steps, "the file" if files == 1 else f"about {files} files"]
        estimate = estimate_frontier(model, samples, options, files, limit, prunes).since_start()
        Notices()(f"{len(steps)} steps: {'; '.join(steps)}. This takes {estimate.line}{longer}")


def _goes_on(options: FrontierOptions) -> bool:
    """Return whether an interrupted search is continued."""
    return options.resume and partial_of(options.output, FRONTIER).exists()


def say_if_whole_fits(options: FrontierOptions, limit: int | None, size: int, *words: str) -> None:
    """Say that a model fits as it is, and by which words of `export` it is written, if it fits.

    Args:
        limit: bytes that are asked for; None: any.
        size: bytes of what `export` writes in the checkpoint's own type.
        words: options of `export`; none if nothing needs to be written.
    """
    if limit is None or size > limit or _goes_on(options):
        return
    how = f" (`{shlex.join(['ckpt-prune', 'export', str(options.model), *words])}`)" if words else ""
    Notices()(
        f"in its own type MODEL takes {decimal_bytes(size)}{how}, and fits within {decimal_bytes(limit)}: stop this "
        "unless it shall be smaller still, or faster"
    )


def as_named_in(folder: Path, options: Read) -> Read:
    """Return options with their inputs as they are called in a folder, where commands with them are run later.

    Names of the Hub and absolute paths stay as they are.
    """

    def rename(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rename, value))
        if value is None or Path(value).is_absolute() or not Path(value).exists():
            return value
        return type(value)(os.path.relpath(value, folder.resolve()))

    inputs = [name for name in INPUTS if name in type(options).model_fields]
    return options.model_copy(update={name: rename(getattr(options, name)) for name in inputs})
