"""What commands print of a job."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ckpt_prune.checkpoint.jsonfile import read_object
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.units import human_bytes, human_count
from ckpt_prune.errors import UserError
from ckpt_prune.filenames import REPORT
from ckpt_prune.sparsity.patterns import UNSTRUCTURED
from ckpt_prune.transform.settle import Settled

SOLVED = 1e-6
"""Relative residual below which a logit solve is as good as the float32 moments it was made from."""


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say on Ctrl-C, or after a crash, that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, UserError) and out.with_name(f"{out.name}.partial").exists():
            click.echo(
                f"{out}.partial keeps the blocks that are done: the same command with --resume continues", err=True
            )
        raise


def kept_line(settled: Settled) -> str:
    """Units kept per block, under which ratio or for which size."""
    asked = settled.recipe.size or (settled.request.asked.size if settled.request.asked is not None else None)
    model, recipe, widths = settled.model, settled.recipe, settled.widths
    if asked is not None and all(width[space] == model.units(space) for width in widths for space in width):
        return f"nothing is dropped: the model is within {asked.words} as it is"
    kept = []
    for space in recipe.spaces:
        counts = sorted({width[space] for width in widths})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        told = f"ratio {recipe.ratio_of(space):g}"
        if recipe.allocation == "least-error":
            told = f"the size of {told}" if asked is None else asked.words
        kept.append(f"{space} {span}/{model.units(space)} ({told})")
    return f"kept per block: {', '.join(kept)}"


def report_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an output of this tool says of itself; nothing for other checkpoints."""
    path = checkpoint.path / REPORT
    return read_object(path) if path.is_file() else {}


def masked_before(checkpoint: Checkpoint) -> str | None:
    """The mask that a checkpoint was made with, or None."""
    mask = report_of(checkpoint).get("mask")
    return mask_name(mask["method"], mask["pattern"]) if mask else None


def mask_lines(report: dict[str, Any]) -> list[str]:
    """What a mask did, and the rotations before it."""
    lines = []
    rotation, linears = report["rotation"], report["linears"]
    if rotation is not None:
        before, after = (sum(e[f"entropy_{when}"] for e in rotation["learned"]) for when in ("before", "after"))
        steps = sorted({entry["steps"] for entry in rotation["learned"]})
        span = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        # Nothing is left to concentrate where every weight is zero.
        change = f" ({after / before - 1:+.1%})" if before > 0 else ""
        lines.append(
            f"rotation {rotation['kind']}: entropy of {rotation['importance']} importance {before:.0f} -> {after:.0f} "
            f"nats{change}, {span} steps"
        )
    if linears:
        zeros, total = sum(e["zeros"] for e in linears), sum(e["rows"] * e["columns"] for e in linears)
        how = mask_name(report["mask"]["method"], report["mask"]["pattern"])
        lines.append(f"masked by {how}: {zeros / total:.2%} zeros in {len(linears)} weights of {human_count(total)}")
        errors = [e["error"] for e in linears if e["error"] is not None]
        if errors:
            lines.append(f"mean error of the outputs on the calibration samples {sum(errors) / len(errors):.4f}")
        asked = report["recipe"]["mask"]["damp"]
        damped = [e for e in linears if e["damp"] is not None and e["damp"] > asked]
        if damped:
            named = ", ".join(e["weight"] for e in damped[:3]) + (", ..." if len(damped) > 3 else "")
            lines.append(
                f"{len(damped)} of {len(linears)} Hessians were singular with damping {asked:g} and took up to "
                f"{max(e['damp'] for e in damped):g}: use more samples ({named})"
            )
    return lines


def recovery_lines(report: dict[str, Any]) -> list[str]:
    """What recovery did, as far as one line each can say."""
    recovery, layers = report.get("recovery"), report.get("layers") or []
    if not recovery or not layers:
        return []

    def mean(key: str, form: str) -> str:
        known = [layer[key] for layer in layers if layer[key] is not None]
        return format(math.fsum(known) / len(known), form) if len(known) == len(layers) else "not finite"

    done = sum(layer["recovered"] for layer in layers)
    lines = [
        f"recovered {done} of {len(layers)} blocks; means over blocks on "
        f"{_counted(recovery['data']['held_out'], 'held-out sample')}: squared error "
        f"{mean('mse_before', '.4g')} -> {mean('mse_after', '.4g')}, CKA {mean('cka_before', '.4f')} -> "
        f"{mean('cka_after', '.4f')}"
    ]
    broken = [str(layer["block"]) for layer in layers if layer["mse_after"] is None]
    if broken:
        lines.append(f"the hidden states after block {broken[0]} are not finite: what follows cannot be recovered")
    idle = [str(x["block"]) for x in layers if x["epochs"] and not x["recovered"] and not x["diverged"]]
    if idle:
        lines.append(
            f"no epoch was better than the old weights in {_counted(len(idle), 'block')} ({', '.join(idle)}), with lr "
            f"{recovery['settings']['lr']:.3g} and less: use more samples or epochs"
        )
    last = layers[-1]
    if None not in (last["mse_before"], last["mse_after"]) and last["mse_after"] > last["mse_before"]:
        lines.append(
            "after the last block the squared error is larger than without recovery: measure what it is worth with "
            "`ckpt-prune evaluate`, or use more samples"
        )
    lost = [str(layer["block"]) for layer in layers if layer["diverged"]]
    if lost:
        lines.append(
            f"training diverged in {_counted(len(lost), 'block')} ({', '.join(lost)}) and was taken back there: use a "
            f"smaller lr than {recovery['settings']['lr']:.3g}"
        )
    asked = recovery["perplexity_after"]
    if asked:
        curve = ", ".join(f"{_perplexity(entry['perplexity'])} with {entry['blocks']}" for entry in asked)
        lines.append(
            f"perplexity on {_counted(recovery['data']['held_out'], 'held-out window')} of "
            f"{recovery['data']['window']} tokens: {curve} blocks recovered"
        )
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _perplexity(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3f}"


def mask_name(method: str, pattern: str) -> str:
    """A mask in a line: its method, and its pattern where it has one."""
    return method if pattern == UNSTRUCTURED else f"{method} {pattern}"


def few_tokens(settled: Settled, *, errors: str) -> str | None:
    """A warning where the calibration tokens are too few for the fits to be more than memory, or None.

    Args:
        settled: what was measured on how much.
        errors: where they stand: above or below.
    """
    request, model, recipe = settled.request, settled.model, settled.recipe
    tokens = request.statistics.index.tokens if request.statistics else 0
    if request.live is not None and not tokens:
        tokens = len(request.live.samples) * request.live.samples.tokens
    widths = [
        max(width[space] for width in settled.widths) * model.unit_columns(space)
        for space in recipe.spaces
        if recipe.needs_gram(space)
    ]
    if recipe.mask is not None and recipe.mask.method == "sparsegpt":
        widths = [model.checkpoint.tensors[model.tensor(0, module)].shape[1] for module in model.family.linears]
    if not widths or tokens >= 2 * max(widths):
        return None
    return (
        f"{tokens} calibration tokens for {max(widths)} inputs of a projection: "
        f"the errors {errors} are a fit, not a prediction; use more samples"
    )


def cost_rows(settled: Settled) -> list[list[str]]:
    """Parameters, bytes and FLOPs before and after, for a table."""
    rows = []
    before: dict[str, Any] = settled.before.model_dump()
    after: dict[str, Any] = settled.output.cost.model_dump()
    for key, show in (("parameters", human_count), ("bytes", human_bytes), ("flops", human_count)):
        name = f"FLOPs / {before['tokens']} tokens" if key == "flops" else key
        rows.append([name, show(before[key]), show(after[key]), f"{after[key] / before[key]:.1%}"])
    return rows


def warning_lines(sites: list[dict[str, Any]]) -> list[str]:
    """What a user should know of single sites: solves that stopped short, and compensation that does not help.

    The latter is what cross-validation over folds says: on samples that the fit has not seen.
    """
    lines = [
        f"the logits of block {s['block']} are not solved to the end (relative residual {s['residual']:.1g}): "
        "use more samples or a larger lambda"
        for s in sites
        if (s["residual"] or 0.0) > SOLVED
    ]
    known = [s for s in sites if s["error_held_out"] is not None and s["method"] != "none"]
    if not known:
        return lines
    for space in dict.fromkeys(s["space"] for s in known):
        errors = [s["error_held_out"] for s in known if s["space"] == space]
        lines.append(f"{space}: mean error on held-out folds, compensated, {sum(errors) / len(errors):.4f}")
    worse = [f"{s['space']} of block {s['block']}" for s in known if s["error_held_out"] > s["error_uncompensated"]]
    if worse:
        named = ", ".join(worse[:5]) + (f" and {len(worse) - 5} more" if len(worse) > 5 else "")
        lines.append(f"compensation does not help on held-out samples at {named}: use more samples or a larger lambda")
    return lines
