"""The results on the front page: measure them, and write its table and chart.

    python tools/results.py measure MODELS [--only MODEL[/RECIPE]] [--data DIR] [--busy]
    python tools/results.py write

`measure` prunes real models, evaluates each output beside its dense model and times both. It keeps what it finds in
`tools/results.json`, one entry for each row, and writes the page anew after each. MODELS is a folder with a model in a
folder of its name (`RUNS` below has the names), `--data` one with the texts and images (default: ../shared/data). Run
it with nothing else on the machine, or say --busy, which leaves out tokens a second. `write` makes the table between
two marks of README.md and the chart `tools/results.svg` from the entries.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CHART, FRONT_PAGE = ROOT / "tools/results.json", ROOT / "tools/results.svg", ROOT / "README.md"
BEGIN, END = "<!-- results: `tools/results.py write` replaces what follows -->", "<!-- end of results -->"
WIKITEXT = "text-wikitext2/wiki.train.first1MB.raw.txt", "text-wikitext2/wiki.test.raw"
PYTHON_CODE = "text-pycode/calib.txt", "text-pycode/eval.txt"
IMAGES = "imagenet-1per-class/images", "imagenet-1per-class/images"
"""Both are one folder, whose labels.csv says which images calibrate and which are held out."""
Row = dict[str, Any]
"""The figures of one run."""


@dataclass(frozen=True)
class Run:
    """One row: a model, a recipe, and what of the data to calibrate and to evaluate on.

    Attributes:
        model: name of its folder in MODELS, or in the data.
        title: as the table names it.
        ratio: None where a pattern such as 2:4 says how much goes.
    """

    model: str
    title: str
    recipe: str
    options: str = ""
    ratio: float | None = 0.2
    data: tuple[str, str] = WIKITEXT

    @property
    def name(self) -> str:
        return f"{self.model}/{self.recipe}"

    @property
    def takes_images(self) -> bool:
        return self.data == IMAGES

    @property
    def command(self) -> str:
        """The command as a reader would type it."""
        return shlex.join(["ckpt-prune", *self.words(self.model, Path(self.data[0]).name, "OUT")])

    def words(self, model: Path | str, calibration: Path | str, out: Path | str) -> list[str]:
        """Return the words of the command, with its files where they are."""
        amount = [] if self.ratio is None else ["--ratio", f"{self.ratio:g}"]
        samples = ["--images", calibration] if self.takes_images else ["--text", calibration]
        samples += ["--samples", "256"] if self.takes_images else ["--samples", "32", "--window", "512"]
        words = [
            "prune",
            model,
            "--recipe",
            self.recipe,
            *amount,
            *shlex.split(self.options),
            *samples,
            "--evaluate-samples",
            "0",
            "-o",
            out,
        ]
        return [str(word) for word in words]


SMOLLM2 = Run("smollm2-135m", "SmolLM2-135M-Instruct", "")
GEMMA3 = Run("gemma3-270m", "Gemma 3 270M", "")
QWEN2 = Run("qwen2.5-0.5b", "Qwen2.5-0.5B", "", data=PYTHON_CODE)
VIT = Run("vit-tiny-imagenet", "ViT-Tiny, ImageNet", "", data=IMAGES)
RUNS = (
    *(replace(SMOLLM2, recipe=recipe) for recipe in ("ridge", "best-uniform", "best", "best-scaled")),
    replace(SMOLLM2, recipe="sparsegpt", ratio=0.5),
    *(replace(GEMMA3, recipe=recipe) for recipe in ("ridge", "best-uniform", "best")),
    replace(QWEN2, recipe="ridge"),
    replace(VIT, recipe="corp-mlp", ratio=0.3),
)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(models: Path, data: Path, only: str | None, *, busy: bool) -> None:
    """Measure the runs, or those that are named, and keep the figures of the others."""
    chosen = [run for run in RUNS if only in (None, run.model, run.name)]
    if not chosen:
        raise SystemExit(f"{only} is none of {', '.join(run.name for run in RUNS)}")
    lacking = [run.model for run in chosen if not place_of(run, models, data).is_dir()]
    if lacking:
        raise SystemExit(f"neither {models} nor {data} has {', '.join(dict.fromkeys(lacking))}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    for run in chosen:
        figures = measure_run(run, place_of(run, models, data), data, busy=busy)
        results[run.name] = {**figures, "date": date.today().isoformat(), "commit": commit}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(run.name, json.dumps(results[run.name]), flush=True)
        write()


def place_of(run: Run, models: Path, data: Path) -> Path:
    """Return the folder of a run's model: in that of models, or else in that of data."""
    return models / run.model if (models / run.model).is_dir() else data / run.model


def measure_run(run: Run, model: Path, data: Path, *, busy: bool) -> Row:
    """Prune, evaluate and time one model."""
    calibration, held_out = (data / path for path in run.data)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        _, seconds, peak = call(*run.words(model, calibration, out))
        report = json.loads((out / "ckpt_prune.json").read_text())
        samples = ["--images", held_out] if run.takes_images else ["--text", held_out, "--window", 512, "--samples", 32]
        score = json.loads(call("evaluate", out, "--against", model, *samples, "--json")[0])
        speed = None if busy or run.takes_images else tokens_per_second(model, out)
    metric = "top1" if run.takes_images else "perplexity"
    return {
        "parameters": [report["before"]["parameters"], report["after"]["parameters"]],
        metric: [score["against"][metric], score[metric]],
        "kl": score["kl"],
        **({} if speed is None else {"tokens_per_second": speed}),
        "cpu_seconds": round(seconds),
        "peak_gib": round(peak / 2**30, 2),
    }


def tokens_per_second(model: Path, out: Path) -> list[float]:
    """Measure the generated tokens a second of the dense and the pruned model, in turns."""
    timed = json.loads(call("benchmark", model, out, "--tokens", 128, "--generate", 32, "--rounds", 10, "--json")[0])
    rows = next(block["rows"] for block in timed["blocks"] if block["phase"] == "decode")
    return [round(float(rows[place]["throughput"]), 1) for place in (0, 1)]


def call(*words: Any) -> tuple[str, float, int]:
    """Run a command; return what it prints, its seconds of processor time and its peak memory in bytes."""
    command = [sys.executable, "-m", "ckpt_prune", *map(str, words)]
    print("+", *map(str, words), file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"failed: {shlex.join(command)}")
        output.seek(0)
        return output.read(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


# ---- the table -------------------------------------------------------------------------------------------------------


def measured_runs(results: dict[str, Row]) -> list[tuple[Run, Row]]:
    """Return the runs that have figures, in the order of `RUNS`."""
    return [(run, results[run.name]) for run in RUNS if run.name in results]


def table(results: dict[str, Row]) -> str:
    """Write the chart's place, the table and the commands behind it, in Markdown."""
    rows = measured_runs(results)
    loss, of_images = "perplexity", ""
    if any("top1" in row for _, row in rows):
        loss, of_images = "perplexity, or accuracy", " Accuracy: the images that labels.csv holds out."
    lines = [
        f"![Parameters and loss after pruning, by model and recipe]({CHART.relative_to(ROOT).as_posix()})",
        "",
        f"| model | recipe | parameters | {loss} | tokens a second | took | measured |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells(run, row))} |" for run, row in rows),
        "",
        f"Dense → pruned, on two CPU cores. Perplexity: 32 held-out windows of 512 tokens.{of_images} Tokens a second: "
        "generated after a prompt of 128; –: not measured. Took: processor time and memory. Each row is one command "
        "with its RECIPE:",
        "",
        "```bash",
        *dict.fromkeys(run.command.replace(f"--recipe {run.recipe} ", "--recipe RECIPE ") for run, _ in rows),
        "```",
    ]
    return "\n".join(lines)


def cells(run: Run, row: Row) -> list[str]:
    """Return the cells of one row."""
    sizes = [f"{count / 1e6:,.1f} M" for count in row.get("parameters", ())]
    loss = [f"{value:.2f}" for value in row.get("perplexity", ())] or [f"{value:.1%} top-1" for value in row["top1"]]
    speed = [f"{value:.1f}" for value in row.get("tokens_per_second", ())]
    took = f"{row['cpu_seconds']} s, {row['peak_gib']:.2f} GiB"
    pairs = [" → ".join(pair) or "–" for pair in (sizes, loss, speed)]
    return [run.title, f"`{run.recipe}`", *pairs, took, f"{row['date']}, {row['commit']}"]


def with_table(page: str, results: dict[str, Row]) -> str:
    """Put the table between the two marks of a page."""
    block = f"{BEGIN}\n{table(results)}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, page, flags=re.DOTALL)


# ---- the chart -------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT, _LINE, _HEAD = 640, 118, 66, 17, 34
_STYLE = (
    "text{fill:#737c87}.strong{font-weight:600}.track{fill:#8b949e;fill-opacity:.25}"
    ".bar{fill:#3b7adb}.more{fill:#c8601f}"
)
"""There is no background, and the colours can be read on white and on black: a dark page may stand in a browser that
prefers light ones."""


def chart(results: dict[str, Row]) -> str:
    """Draw what stays of the parameters, and the loss, of every run beside the dense model.

    Bars are those of the page of `ckpt-prune report`: a track to 100 %, and what lies above it in another colour.
    """
    drawn = []
    for run, row in measured_runs(results):
        kinds = {"parameters": "parameters", "perplexity": "perplexity", "top1": "accuracy"}
        drawn.append((run, [(word, row[kind]) for kind, word in kinds.items() if kind in row]))
    most = max(1.0, *(after / before for _, bars in drawn for _, (before, after) in bars))
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _HEAD + sum((1 + len(bars)) * _LINE + 8 for _, bars in drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" font-size="13" font-family="system-ui, sans-serif">',
        "<title>Parameters and loss after pruning, by model and recipe</title>",
        f"<style>{_STYLE}</style>",
        '<text x="0" y="16">After pruning, as a share of the dense model</text>',
    ]
    y = _HEAD
    for run, bars in drawn:
        lines.append(f'<text class="strong" x="0" y="{y + 12}">{escape(run.title)} · {escape(run.recipe)}</text>')
        for word, (before, after) in bars:
            y += _LINE
            lines += draw_bar(word, after / before, y, scale)
        y += _LINE + 8
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw_bar(word: str, share: float, y: int, scale: float) -> list[str]:
    """Draw one bar with its word and its percentage."""
    lines = [f'<text x="0" y="{y + 12}">{word}</text>']
    for kind, start, stop in (("track", 0.0, 1.0), ("bar", 0.0, min(share, 1.0)), ("more", 1.0, share)):
        if stop > start:
            inset = 0 if kind == "track" else 2
            lines.append(
                f'<rect class="{kind}" x="{_LEFT + start * scale:.1f}" y="{y + 2 + inset}" '
                f'width="{(stop - start) * scale:.1f}" height="{11 - 2 * inset}"/>'
            )
    return [*lines, f'<text x="{_LEFT + max(1, share) * scale + 8:.1f}" y="{y + 12}">{share:.0%}</text>']


def write() -> None:
    """Write the table into README.md, and the chart."""
    results = json.loads(RESULTS.read_text())
    CHART.write_text(chart(results))
    FRONT_PAGE.write_text(with_table(FRONT_PAGE.read_text(), results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = parser.add_subparsers(dest="work", required=True)
    measuring = works.add_parser("measure", help="measure rows, and write the page")
    measuring.add_argument("models", type=Path, metavar="MODELS")
    measuring.add_argument("--only", metavar="MODEL[/RECIPE]", help="the rows of one model, or one row")
    measuring.add_argument("--data", type=Path, default=ROOT / "../shared/data", metavar="DIR")
    measuring.add_argument("--busy", action="store_true", help="other work runs: leave out tokens a second")
    works.add_parser("write", help="write the page from tools/results.json")
    args = parser.parse_args()
    if args.work == "measure":
        measure(args.models.resolve(), args.data.resolve(), args.only, busy=args.busy)
    else:
        write()


if __name__ == "__main__":
    main()
