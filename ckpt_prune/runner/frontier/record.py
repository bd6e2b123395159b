"""The result of `frontier`: its record, a sentence that says what to do, a picture, and commands that make the file."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.filenames import (
    FRONTIER_COMMANDS,
    FRONTIER_FILE,
    FRONTIER_PAGE,
    FRONTIER_PRUNED,
    FRONTIER_RECORD,
)
from ckpt_prune.common.formatting import decimal_bytes, plural
from ckpt_prune.evaluation.file_score import FileScore
from ckpt_prune.evaluation.quality import FEW, judge
from ckpt_prune.job.report import Loss
from ckpt_prune.runner.frontier.candidates import LOST_ENERGY, MeasuredFile, MeasuredRounded, RoundedCandidate
from ckpt_prune.show.charts import draw
from ckpt_prune.show.html import print_page
from ckpt_prune.show.section import Figure, Line, Point, Section, Table, draw_figure

FILE, COMMANDS, PRUNED, PAGE = FRONTIER_FILE, FRONTIER_COMMANDS, FRONTIER_PRUNED, FRONTIER_PAGE
CHART = "frontier.svg"
RECIPE = "recipe.yaml"
"""The recipe of the file, if columns go."""
MADE = "made"
"""What the commands write, in the same folder: a folder, or a file of this name with an ending. The search writes no
such name, so that they never replace what it found."""
Result = MeasuredFile | MeasuredRounded
FEWER_TOKENS = (
    "Of files with fewer tokens, KL is what the text costs more, in nats a token as all tokens write it, and so is the "
    "perplexity; they predict other tokens than MODEL, so there is no median, 90% or top-1. Tokens stay by what --text "
    "has: on other kinds of text such files lose more. So give --text of every kind, or --all-tokens."
)
USABLE = 2.0
"""Times the dense model's perplexity from which on nothing is called usable; what is predicted to lose more than its
logarithm in nats is not made."""


CLOSE = 1.15
"""For a loss, what is made is chosen again if it loses less than allowed by more than this factor, or too much."""
STEEPEST = 3.0
"""The largest exponent of a correction that two tries tell; the smallest is its inverse."""
USUAL_LOSS = 0.05
"""Growth of the perplexity that is allowed if neither a size nor a loss is asked for."""
SMALLEST = ("smallest within the loss", "smallest within the loss, second try", "smallest within the loss, third try")
"""Names of what is made for a loss, one after the other."""
R = TypeVar("R", MeasuredFile, MeasuredRounded)
T = TypeVar("T")


def best_within(found: Sequence[R], limit: int | None, loss: float | None) -> R | None:
    """Return the one that loses least within a size, or the smallest within a loss; None if there is none."""
    if limit is not None:
        within = [each for each in found if each.score.bytes <= limit]
        return min(within, key=lambda each: each.score.kl, default=None)
    within = [each for each in found if each.score.kl <= (loss or 0)]
    return min(within, key=lambda each: each.score.bytes, default=None)


def choose_for_loss(
    loss: float,
    results: Sequence[Result],
    choose: Callable[[float], T],
    same: Callable[[T], Any] = lambda choice: choice,
) -> Iterator[tuple[str, T]]:
    """Yield names, each with what a budget chooses, until what is made keeps closely to `loss`.

    Predictions of all weights at once are off by much the same factor, which corrects the second try. The third follows
    a secant through the logarithms of the first two. Both aim at the middle of what is close. It also ends if no choice
    is left, or if a choice repeats.

    Args:
        results: what was measured; the caller adds what it makes for each name.
        choose: returns the choice for a loss; BudgetError if there is none.
        same: what two choices have in common if they are one.
    """
    aim = loss / math.sqrt(CLOSE)
    allowed, seen, tries = loss, list[Any](), list[tuple[float, float]]()
    for name in SMALLEST:
        try:
            choice = choose(allowed)
        except BudgetError:
            return
        if same(choice) in seen:
            return
        seen.append(same(choice))
        yield name, choice
        measured = results[-1].score.kl
        if loss / CLOSE <= measured <= loss:
            return
        tries.append((allowed, max(measured, 1e-9)))
        allowed *= (aim / tries[-1][1]) ** _correction(tries)
        # Pruned choices and whole ones are not on one line: stay between what is known to be good and to be too much.
        good = max((told for told, lost in tries if lost <= loss), default=0.0)
        bad = min((told for told, lost in tries if lost > loss), default=math.inf)
        if good and not good < allowed < bad and math.isfinite(bad):
            allowed = math.sqrt(good * bad)


def _correction(tries: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the logarithm of what is allowed over that of what is measured, in the last two tries."""
    if len(tries) < 2:
        return 1.0
    (before, lost_before), (after, lost) = tries[-2:]
    rise = math.log(lost / lost_before)
    slope = math.log(after / before) / rise if rise else 1.0
    # Noise may make it far too steep or flat.
    return min(max(slope, 1 / STEEPEST), STEEPEST)


def words_of_target(limit: int | None, loss: float | None, unit: str = "nats a token") -> str:
    return f"within a loss of {loss or 0:.3f} {unit}" if limit is None else f"within {decimal_bytes(limit)}"


def words_of_energy(loss: float | None) -> str:
    """Return what a loss is of, where vectors are compared."""
    return f"of the vectors' energy, twice the {50 * (loss or 0):.3g}% that the cosine may lose"


def pareto(several: Iterable[T], figures: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return those that no other one beats in size and loss, the smallest first; of equal ones the first."""
    kept: list[T] = []
    for each in sorted(several, key=figures):
        if not kept or figures(each)[1] < figures(kept[-1])[1]:
            kept.append(each)
    return kept


@dataclass(frozen=True)
class Frontier:
    """Candidates that were measured, and the one to take.

    Attributes:
        folder: that holds the file and the picture.
        place: of the model, as it is called there.
        dense: perplexity of the dense model; None if it predicts no tokens.
        dense_bytes: of the dense model's tensors, as they are stored.
        found: in the order they were made.
        best: within the target; None if nothing is.
        asked: the target in words.
        beyond_use: why nothing was made, in words; empty if something was.
        reach: bytes of the smallest file that is predicted to be usable; None if that is not known.
        commands: that make the best one again, run in `folder`.
        data_words: what was measured on.
        runtime: that it was measured in.
        loss, agreement: what `kl` and `top1` of a score are.
        items: what is read, and counted a second.
        remarks: sentences of what the figures leave out.
        windows: of text, or pairs, that it was measured on; None of images.
    """

    folder: Path
    place: str
    model: str
    dense: float | None
    dense_bytes: int
    found: Sequence[Result]
    best: Result | None
    asked: str
    beyond_use: str
    reach: int | None
    commands: Sequence[str]
    data_words: str
    runtime: str = "llama.cpp"
    loss: str = "KL"
    agreement: str = "top-1"
    items: str = "tokens"
    remarks: Sequence[str] = ()
    windows: int | None = None

    @property
    def passed(self) -> bool:
        """Whether something usable was found."""
        return self.best is not None and self._is_usable(self.best.score)

    def _is_usable(self, score: FileScore) -> bool:
        if score.perplexity is None or self.dense is None:
            return score.kl < math.log(USABLE)
        return score.perplexity < USABLE * self.dense

    @property
    def source(self) -> str:
        """The checkpoint that the best one is made of, as it is called in `folder`."""
        return PRUNED if any(command.endswith(f" -o {PRUNED}") for command in self.commands) else self.place

    @property
    def notes(self) -> list[str]:
        """Sentences that tell how to read the figures, and what they leave out."""
        has_fewer = any(each.candidate.rows is not None for each in self.found)
        is_short = self.windows is not None and self.windows < FEW
        few = f"{plural(self.windows, 'window')} cannot tell which of two is better if they are near: more"
        more = [f"{few} --held-out-samples tell it."] if is_short else []
        return [*([FEWER_TOKENS] if has_fewer else []), *more, *self.remarks]

    @property
    def pareto(self) -> list[Result]:
        """Return those that no other one beats in bytes and divergence, the smallest first."""
        return pareto(self.found, lambda each: (each.score.bytes, each.score.kl))

    @property
    def _least_usable(self) -> int | None:
        """Bytes of the smallest usable file, predicted or measured, above what was found not to be usable."""
        usable = [each.score.bytes for each in self.found if self._is_usable(each.score)]
        usable += [] if self.reach is None else [self.reach]
        known = 0 if self.best is None else self.best.score.bytes
        return min((size for size in usable if size > known), default=None)

    @property
    def sentence(self) -> str:
        """Say what to do for the target: the answer first, and which types last, as that may be long."""
        if self.best is None or not self.passed:
            beside = "" if self.best is None else f"; the best, {self.best.candidate.name}, has {self._figures}"
            more = "" if self._least_usable is None else f"; ask for {decimal_bytes(self._least_usable)} or more"
            usable = [each for each in self.found if each.score.ms is not None and self._is_usable(each.score)]
            for each in sorted(usable, key=lambda each: each.score.ms or 0)[:1]:
                time, name = each.score.ms, each.candidate.name
                more = f"; the fastest that is usable takes {time:.4g} ms: {name}, {self.words_of(each.score)}"
            return f"nothing usable {self.asked}{self.beyond_use}{beside}{more}"
        candidate = self.best.candidate
        drops = [] if candidate.rows is None else [f"all but {candidate.rows:,} tokens"]
        heads = "heads and " * (isinstance(candidate, RoundedCandidate) and candidate.heads)
        drops += [f"{heads}columns of MLPs and refit what stays"] if candidate.columns else []
        first = f"drop {' and '.join(drops)}" if drops else "keep all weights"
        took = "" if self.best.score.ms is None else f"{self.best.score.ms:.4g} ms, "
        size = f"{took}{decimal_bytes(self.best.score.bytes)}"
        return f"{first}: {size}, {self._figures}, {self.asked}; {candidate.advice}"

    @property
    def _figures(self) -> str:
        assert self.best is not None
        return self.words_of(self.best.score)

    def words_of(self, score: FileScore) -> str:
        """Return the figures of a score."""
        if score.perplexity is not None and self.dense is not None:
            return f"{self.loss} {score.words_of_kl}, perplexity {score.perplexity:.2f} (MODEL {self.dense:.2f})"
        ranks = "" if score.ranks is None else f", rank correlation {score.ranks:.4f}"
        return f"{self.loss} {score.kl:.4f}, {self.agreement} {score.top1 or 0:.1%}{ranks}"

    @property
    def loss_of_best(self) -> Loss | None:
        """The loss of the best candidate, as its own record keeps it: without a KL if that has fewer tokens."""
        if self.best is None or self.dense is None:
            return None
        score, on = self.best.score, self.data_words
        after = score.perplexity if math.isfinite(score.perplexity or math.inf) else None
        kl, same = (score.kl, score.top1) if self.best.candidate.rows is None else (None, None)
        figures: dict[str, Any] = {"after": after, "kl": kl, "agreement": same, "windows": self.windows}
        return judge(Loss(of="perplexity", before=self.dense, **figures, data=on, against=self.model))

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        pareto = [each.candidate.name for each in self.pareto]
        return {
            "model": self.model,
            "source": self.source,
            "asked": self.asked,
            "measured_in": self.runtime,
            "measured_on": self.data_words,
            "loss": self.loss,
            "dense_perplexity": self.dense,
            "dense_bytes": self.dense_bytes,
            "candidates": [_row(each) | {"pareto": each.candidate.name in pareto} for each in self.found],
            "recommended": None if self.best is None or not self.passed else self.best.candidate.name,
            "sentence": self.sentence,
            "remarks": list(self.remarks),
            "commands": list(self.commands),
        }

    def table(self) -> Table:
        """Return a row for each candidate, the smallest first, and one for the dense model."""
        names = {each.candidate.name for each in self.pareto}
        rows = list[list[str]]()
        for each in sorted(self.found, key=lambda each: each.score.bytes):
            score, predicted = each.score, each.candidate.kl
            rows.append(
                [
                    ("* " if each.candidate.name in names else "") + each.candidate.name,
                    decimal_bytes(score.bytes),
                    f"{score.kl:.4f}",
                    "–" if predicted is None else f"{predicted:.4f}",
                    "–" if score.kl_median is None else f"{score.kl_median:.4f}",
                    "–" if score.kl_90 is None else f"{score.kl_90:.4f}",
                    "–" if score.perplexity is None else f"{score.perplexity:.2f}",
                    "–" if score.top1 is None else f"{score.top1:.1%}",
                    "–" if score.ranks is None else f"{score.ranks:.4f}",
                    "–" if score.ms is None else f"{score.ms:.4g}",
                    *(f"{speed:.0f}" for speed in score.speeds),
                ]
            )
        speeds = [f"{self.items} read/s", f"{self.items} written/s"]
        speeds = speeds[: max((len(each.score.speeds) for each in self.found), default=2)]
        losses = [f"{self.loss} {what}" for what in ("measured", "predicted", "median", "90%")]
        headings = ["file", "size", *losses, "perplexity", self.agreement, "rank correlation", "ms", *speeds]
        dense = ["MODEL as it is", decimal_bytes(self.dense_bytes), "0", *"–––"]
        dense.append("–" if self.dense is None else f"{self.dense:.2f}")
        rows.append(dense + ["–"] * (len(headings) - len(dense)))
        known = [any(row[place] != "–" for row in rows) for place in range(len(headings))]
        shown = [[cell for cell, keep in zip(row, known, strict=True) if keep] for row in (headings, *rows)]
        return Table(shown[0], shown[1:])

    @property
    def legend(self) -> str:
        """Say what the table holds, of those columns that it has."""
        text = f"measured in {self.runtime} on {self.data_words}; * marks what nothing beats in size and {self.loss}"
        words = {
            "ms": "ms: what it takes of the work that a time is asked for, the fastest of several",
            "KL measured": "KL: how far the predictions are from MODEL's, the mean in nats",
            f"{LOST_ENERGY} measured": f"{LOST_ENERGY}: what the vectors lose of theirs, twice what the cosine loses",
            f"{self.loss} predicted": "predicted: before the file was made, of the data that it was made by",
            f"{self.loss} 90%": "median, 90%: half, and 90% of the tokens, lose no more",
            "rank correlation": "rank correlation: Spearman's, of the cosines of all pairs of texts in both",
            "top-1": f"top-1: share of the {self.items} for which both put the same first",
        }
        return "; ".join([text, *(words[heading] for heading in self.table().columns if heading in words)])

    def figures(self) -> Sequence[Figure]:
        """Draw divergence over size: what nothing beats as a line, and the others."""
        best = {each.candidate.name for each in self.pareto}
        lines = [
            _line("nothing is smaller and loses less", [each for each in self.found if each.candidate.name in best]),
            _line("the others", [each for each in self.found if each.candidate.name not in best]),
        ]
        what = "mean KL divergence from the dense model, in nats" if self.loss == "KL" else self.loss
        note = f"Lower is better: {what}, in {self.runtime}."
        return draw_figure("Loss over size", note, self.loss, *lines, across="MB", joined=True)

    def lines(self) -> list[str]:
        notes = [self.legend] if self.found else []
        notes += self.notes
        if self.commands:
            script, folder = (shlex.quote(str(place)) for place in (self.folder / COMMANDS, self.folder))
            own = f"sh {script} makes it again, beside itself, as these do:"
            return [*notes, self.sentence, own, f"cd {folder}", *self.commands]
        return [*notes, self.sentence]


def _line(name: str, several: Sequence[Result]) -> Line:
    points = {}
    for each in sorted(several, key=lambda each: -each.score.kl):  # of several at one place the best stays
        place, kl = round(each.score.bytes / 1e6), each.score.kl
        points[place] = Point(place, kl, kl, kl, f"{kl:.4f}, {each.candidate.name}")
    return Line(name, [points[place] for place in sorted(points)])


def _row(measured: Result) -> dict[str, Any]:
    candidate = measured.candidate
    pruned = ({"mlp": list(candidate.columns)} if candidate.columns else {}) | (
        {} if candidate.rows is None else {"vocabulary": candidate.rows}
    )
    return {
        "name": candidate.name,
        **asdict(measured.score),
        "predicted_kl": candidate.kl,
        "pruned": pruned or None,
        "types": candidate.kinds,
    }


def write_pages(frontier: Frontier, folder: Path, files: Sequence[str]) -> None:
    """Write record, page, picture and commands into a folder that holds the best file; `files` is what is there."""
    files = [*files, PAGE, *([CHART] if frontier.found else []), *([COMMANDS] if frontier.best else [])]
    if frontier.best is not None:
        about = "# Makes it again beside this script, in whose folder the commands run."
        again = [f"{each} --overwrite" if each.startswith("ckpt-prune ") else each for each in frontier.commands]
        lines = ["#!/bin/sh", about, "set -e", 'cd "$(dirname "$0")"', *again, ""]
        write_atomically(folder / COMMANDS, "\n".join(lines))
    sentences = [frontier.sentence, f"{frontier.legend[0].upper()}{frontier.legend[1:]}."]
    sentences += frontier.notes
    section = Section("Smaller, by what?", sentences, tables=[frontier.table()], figures=frontier.figures())
    write_atomically(folder / PAGE, print_page(f"{frontier.model}: sizes and losses", [section]))
    for figure in frontier.figures():
        svg = draw(figure).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write_atomically(folder / CHART, svg)
    write_atomically(folder / FRONTIER_RECORD, pretty_json(frontier.data() | {"files": files}))
