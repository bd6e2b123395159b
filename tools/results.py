"""The results on the front page: measure them, and write its table and chart.

    PYTHONPATH=. python tools/results.py measure --models DIR --data DIR [--only MODEL/RECIPE]
    PYTHONPATH=. python tools/results.py write

`measure` prunes real models, evaluates each output beside its dense model and times both, and writes what it finds to
`tools/results.json`, one entry for each run. DIR has models by name and data sets by name. Nothing else may run on the
machine meanwhile. `write` makes the table in README.md and the chart `tools/results.svg` from that file.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CHART, FRONT_PAGE = ROOT / "tools/results.json", ROOT / "tools/results.svg", ROOT / "README.md"
BEGIN, END = "<!-- results: `tools/results.py write` replaces what follows -->", "<!-- end of results -->"
WIKITEXT = "text-wikitext2/wiki.train.first1MB.raw.txt", "text-wikitext2/wiki.test.raw"
PYTHON_CODE = "text-pycode/calib.txt", "text-pycode/eval.txt"


@dataclass(frozen=True)
class Run:
    """One row: a model of `--models`, a recipe, and texts of `--data` to calibrate and to evaluate on."""

    model: str
    recipe: str
    options: str = ""
    ratio: float | None = 0.2
    texts: tuple[str, str] = WIKITEXT

    @property
    def name(self) -> str:
        return f"{self.model}/{self.recipe}"

    @property
    def amount(self) -> str:
        """The option that says how much goes; none where a pattern such as 2:4 says it."""
        return "" if self.ratio is None else f"--ratio {self.ratio:g} "

    @property
    def command(self) -> str:
        """The command as a reader would type it."""
        return (
            f"ckpt-prune prune {self.model} --recipe {self.recipe} {self.amount}{self.options}"
            f"--text {Path(self.texts[0]).name} --samples 32 --window 512 -o OUT"
        )


RUNS = (
    Run("smollm2-135m", "ridge"),
    Run("smollm2-135m", "sparsegpt", ratio=0.5),
    Run("smollm2-135m", "best"),
    Run("smollm2-135m", "best-uniform"),
    Run("smollm2-135m", "best-scaled"),
    Run("gemma3-270m", "ridge", " --container any"),
    Run("gemma3-270m", "best"),
    Run("qwen2.5-0.5b", "ridge", texts=PYTHON_CODE),
)


def measure(models: Path, data: Path, only: str | None) -> None:
    """Measure the runs, or the one that is named, and keep the figures of the others."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    for run in RUNS:
        if only is None or only == run.name:
            figures = measure_run(run, models / run.model, data)
            results[run.name] = {
                "model": run.model,
                "recipe": run.recipe,
                "command": run.command,
                **figures,
                "date": date.today().isoformat(),
                "commit": commit.stdout.strip(),
            }
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(results[run.name]), flush=True)


def measure_run(run: Run, model: Path, data: Path) -> dict[str, Any]:
    """Prune, evaluate and time one model."""
    calibration, held_out = (data / text for text in run.texts)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = ["prune", model, "--recipe", run.recipe, *shlex.split(run.amount + run.options)]
        words += ["--text", calibration, "--samples", 32, "--window", 512, "-o", out]
        _, seconds, peak = call(*words)
        report = json.loads((out / "ckpt_prune.json").read_text())
        held_out_words = ["--text", held_out, "--window", 512, "--samples", 32, "--json"]
        score = json.loads(call("evaluate", out, "--against", model, *held_out_words)[0])
        speed = json.loads(
            call("benchmark", model, out, "--tokens", 128, "--generate", 32, "--rounds", 10, "--json")[0]
        )
    dense_speed, pruned_speed = (tokens_per_second(speed, place) for place in (0, 1))
    return {
        "parameters": [report["before"]["parameters"], report["after"]["parameters"]],
        "perplexity": [score["against"]["perplexity"], score["perplexity"]],
        "kl": score["kl"],
        "tokens_per_second": [dense_speed, pruned_speed],
        "cpu_seconds": round(seconds),
        "peak_gib": round(peak / 2**30, 2),
        "own_code": report["container"]["remote_code"],
    }


def tokens_per_second(speed: dict[str, Any], place: int) -> float:
    """Read the generated tokens a second of one of two models from what `benchmark --json` prints."""
    rows = next(block["rows"] for block in speed["blocks"] if block["phase"] == "decode")
    return round(float(rows[place]["throughput"]), 1)


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


def table(results: dict[str, Any]) -> str:
    """Write the table and the commands behind it, in Markdown."""
    lines = [
        "| model | recipe | parameters | perplexity | tokens/s | processor time, memory | loads with |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results.values():
        before, after = (f"{count / 1e6:,.1f} M" for count in row["parameters"])
        dense, pruned = (f"{value:.2f}" for value in row["perplexity"])
        slow, fast = (f"{value:.1f}" for value in row["tokens_per_second"])
        took = f"{row['cpu_seconds'] / 60:.1f} min, {row['peak_gib']:.1f} GiB"
        loads = "own code" if row["own_code"] else "stock"
        cells = [row["model"], f"`{row['recipe']}`", f"{before} → {after}", f"{dense} → {pruned}"]
        lines.append(f"| {' | '.join([*cells, f'{slow} → {fast}', took, loads])} |")
    dates = sorted({f"{row['date']} at commit {row['commit']}" for row in results.values()})
    commands = dict.fromkeys(row["command"] for row in results.values())
    lines += [
        "",
        f"Two CPU cores, {' and '.join(dates)}. Perplexity: 32 held-out windows of 512 tokens. Tokens/s: greedy, after",
        "128 tokens, both models in turns. Loads with: stock classes of transformers, or the code beside the weights.",
        "",
        "```bash",
        *commands,
        "```",
    ]
    return "\n".join(lines)


def chart(results: dict[str, Any]) -> str:
    """Draw what stays of the parameters, and the perplexity, of every run beside the dense model.

    The SVG has a background of its own, so that it reads on light and dark pages, whatever the browser prefers. Bars
    are those of the page of `ckpt-prune report`: a track to 100 %, and what lies above it in another colour.
    """
    width, left, line, head = 560, 100, 17, 34
    rows = [
        (name, [(what, row[what][1] / row[what][0]) for what in ("parameters", "perplexity")])
        for name, row in results.items()
    ]
    scale = (width - left - 60) / max(1.0, *(share for _, bars in rows for _, share in bars))
    height = head + len(rows) * (3 * line + 8) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="13"'
        ' font-family="system-ui, sans-serif">',
        "<title>Parameters and perplexity after pruning, by model and recipe</title>",
        "<style>.page{fill:#fff}text{fill:#1c1f23}.soft{fill:#5a626c}.strong{font-weight:600}.track{fill:#dfe3e8}"
        ".bar{fill:#1b5fc1}.more{fill:#b84a0e}@media(prefers-color-scheme:dark){.page{fill:#15181c}text{fill:#e8eaed}"
        ".soft{fill:#a3abb5}.track{fill:#2b3037}.bar{fill:#6ea8fe}.more{fill:#f0904f}}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
        '<text class="soft" x="12" y="20">After pruning, as a share of the dense model</text>',
    ]
    for place, (name, bars) in enumerate(rows):
        y = head + place * (3 * line + 8) + 12
        lines.append(f'<text class="strong" x="12" y="{y}">{name.replace("/", " · ")}</text>')
        for below, (what, share) in enumerate(bars, start=1):
            top = y + below * line - 10
            lines.append(f'<text class="soft" x="12" y="{top + 10}">{what}</text>')
            for kind, start, stop in (("track", 0, 1), ("bar", 0, min(share, 1)), ("more", 1, share)):
                if stop > start:
                    inset = 0 if kind == "track" else 2
                    lines.append(
                        f'<rect class="{kind}" x="{left + start * scale:.1f}" y="{top + inset}" '
                        f'width="{(stop - start) * scale:.1f}" height="{11 - 2 * inset}"/>'
                    )
            end = left + max(1, share) * scale
            lines.append(f'<text x="{end + 8:.1f}" y="{top + 10}">{share:.0%}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def with_table(page: str, results: dict[str, Any]) -> str:
    """Put the table between the two marks of a page."""
    made = f"{BEGIN}\n{table(results)}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, page, flags=re.DOTALL)


def write() -> None:
    """Write the table into README.md, and the chart."""
    results = json.loads(RESULTS.read_text())
    CHART.write_text(chart(results))
    FRONT_PAGE.write_text(with_table(FRONT_PAGE.read_text(), results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["measure", "write"])
    parser.add_argument("--models", type=Path, default=ROOT / "../shared/models")
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data")
    parser.add_argument("--only", metavar="MODEL/RECIPE")
    args = parser.parse_args()
    if args.work == "measure":
        measure(args.models.resolve(), args.data.resolve(), args.only)
    else:
        write()


if __name__ == "__main__":
    main()
