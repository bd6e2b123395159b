"""`ckpt-prune statistics`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.function import takes
from ckpt_prune.cli.command import Command
from ckpt_prune.options.commands import StatisticsAddOptions, StatisticsExportOptions, StatisticsShowOptions

if TYPE_CHECKING:
    from ckpt_prune.measure.statistics.folder import Statistics

FINGERPRINTS = {
    "model": "of the checkpoint it was measured on",
    "tokenizer": "of its tokenizer or image processor",
    "data": "of the samples, text by text",
    "digest": "of this folder",
}
"""Keys of a summary that hold a fingerprint, and what it is of."""


@takes(StatisticsShowOptions)
def show(options: StatisticsShowOptions) -> dict[str, Any]:
    """Print what statistics were measured on and what they hold."""
    from ckpt_prune.measure.statistics.folder import Statistics

    return Statistics(options.folder).summary()


def _show_summary(summary: dict[str, Any], _options: dict[str, Any]) -> None:
    from ckpt_prune.common.formatting import human_bytes

    for key, value in summary.items():
        if value == {}:
            continue
        shown = human_bytes(value) if key == "bytes" else value
        if key in FINGERPRINTS and value:
            # A beginning is enough to compare them.
            of = [value] if isinstance(value, str) else value
            shown = f"{FINGERPRINTS[key]}, sha256 {', '.join(each[:12] for each in of)}…"
            click.echo(f"{key:<14} {shown}")
            continue
        if key in ("predicted", "effects"):
            shown = f"of {len(value)} sites (--json has them)"
        elif key == "stream":
            shown = f"of {summary['blocks']} blocks (--json has it)"
        elif key == "spaces":
            shown = f"of {', '.join(value)} (--json has them)"
        elif isinstance(value, list):
            shown = ", ".join(map(str, value))
        elif isinstance(value, dict):
            shown = ", ".join(
                f"{k} ({' x '.join(map(str, v if isinstance(v, list) else [v]))})" for k, v in value.items()
            )
        click.echo(f"{key:<14} {shown}")


@takes(StatisticsAddOptions)
def add(options: StatisticsAddOptions) -> "Statistics":
    """Write the sum of statistics folders: the same model on more text, or shards of one text.

    Samples that two of them have seen are refused, because they would count twice.
    """
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.measure.statistics.measurement import add_statistics

    return add_statistics([Statistics(each) for each in options.folders], options.output, overwrite=options.overwrite)


def _show_sum(statistics: "Statistics", options: dict[str, Any]) -> None:
    what = "images" if statistics.index.modality == "image" else "windows"
    click.echo(f"{options['output']}: {statistics.index.samples} {what}, {statistics.index.tokens} tokens")


@takes(StatisticsExportOptions)
def export(options: StatisticsExportOptions) -> dict[str, Any]:
    """Write how much each input of a model matters as an importance matrix of llama.cpp."""
    from ckpt_prune.gguf import check_gguf_place, require_gguf

    require_gguf()
    from ckpt_prune.checkpoint.files import check_place

    out = check_place(options.imatrix)
    check_gguf_place(out, overwrite=options.overwrite)
    from ckpt_prune.gguf.importance import write_imatrix
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.model.containers.opening import Opening, open_model

    statistics = Statistics(options.folder)
    model = open_model(options.model, Opening(options.trust_remote_code, packed=True))
    importance = write_imatrix(out, statistics, model)
    return {"imatrix": str(out), "matrices": len(importance), "tokens": statistics.index.tokens}


def _show_export(written: dict[str, Any], _options: dict[str, Any]) -> None:
    click.echo(f"{written['imatrix']}: the inputs of {written['matrices']} matrices on {written['tokens']} tokens")


command = click.Group(
    "statistics",
    [
        Command(show, _show_summary, examples=["statistics show STATS", "statistics show STATS --json"], data=dict),
        Command(
            add,
            _show_sum,
            examples=["statistics add STATS MORE -o BOTH", "statistics add SHARD1 SHARD2 SHARD3 -o STATS"],
            data=None,
        ),
        Command(
            export,
            _show_export,
            examples=[
                "statistics export STATS --model MODEL --imatrix imatrix.gguf",
                "statistics export STATS --model MODEL --imatrix imatrix.gguf --overwrite",
            ],
            data=dict,
        ),
    ],
    help="Show, add or export statistics folders.",
)
