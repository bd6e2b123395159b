"""Messages about a job for the user, one line each. What a stage has to say stands in its folder."""

from collections.abc import Iterable

from pydantic import ValidationError

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes, human_count, plural
from ckpt_prune.common.progress import Notices
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.samples.choose import asked_data, usual_samples
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import RUNTIMES
from ckpt_prune.model.ties import TIE_KEY
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE, WIDER_CHOICE
from ckpt_prune.runner.changes import change_lines
from ckpt_prune.runner.plannable import is_plannable
from ckpt_prune.runner.runtimes import fit_to_runtimes
from ckpt_prune.stages.folders import source_lines, stages_of
from ckpt_prune.stages.report import Report, find_report
from ckpt_prune.stages.shared.tokens import calibration_tokens

_NAMED = 3
"""So many of a list are named."""
_ALIKE = 0.005
"""Predicted losses that differ by less than this share are told to be the same."""


def messages(prepared: Prepared) -> list[str]:
    """Return the messages about a job, besides its sizes."""
    lines, model = [], prepared.model
    within = model.checkpoint.within
    if within is not None:
        composite = load_composite(within.whole.config)
        part = composite.part(within.part)
        note = "it is calibrated on images with their text" if prepared.sees_images else part.note
        figures = "all figures are" if part.stack is None else "sizes are of the whole model, other figures"
        lines.append(f"{figures} of the {within.part} part of this {composite.model_type}: {note}")
    lines += change_lines(prepared)
    if prepared.container_known:
        container = prepared.output.container
        way = container.instead
        instead = f"for a stock class instead: {way[0].lower()}{way[1:]}" if way else None
        lines += filter(None, [container.note, instead])
    if model.checkpoint.ignored:
        lines.append(
            f"{ignored_words(model)}: they are left out, and the output's config.json no longer speaks of them"
        )
    lines += filter(None, [_words_of_few_bits(prepared)])
    lines += filter(None, [tied_words(model)])
    source_report = find_report(model.checkpoint.path)
    if source_report is not None:
        reports = [source_report, *map(Report.read, source_report.others)]
        own = [each for each in reports if within is None or each.part in (None, within.part)]
        lines += [line for each in own for line in source_lines(each)]
    lines += [line for stage in stages_of(prepared.whole.recipe) for line in stage.messages(prepared)]
    lines += warnings(prepared)
    return [*lines, *filter(None, [wider_choice(prepared)])]


def _words_of_few_bits(prepared: Prepared) -> str | None:
    """Say how an output stores weights that its source has in few bits; None if that has none."""
    source, after = prepared.model.checkpoint, prepared.output.cost.bytes
    if source.quantisation is None:
        return None
    method = source.quantisation.get("quant_method")
    if prepared.output.kept is not None:
        return f"experts that stay keep their bytes ({method}), and so do all other weights"
    size, before = decimal_bytes(after), decimal_bytes(prepared.before.bytes)
    return (
        f"the output has plain weights, {size} where MODEL has {before} in {method}: weights of few bits stay so where "
        "whole experts go and nothing is fitted (--recipe reap)"
    )


def warnings(prepared: Prepared) -> list[str]:
    """Return why figures of the job are not to be relied on: too few tokens, or strengths that do not suit them."""
    if prepared.lacks_moments:
        return []
    stages, tokens = stages_of(prepared.whole.recipe), calibration_tokens(prepared)
    if lines := [line for stage in stages for line in stage.warnings(prepared)]:
        return lines
    widest = max((stage.widest_fit(prepared) for stage in stages), default=0)
    if tokens >= 2 * widest:
        return []
    return [
        f"few calibration tokens: {tokens:,} for {widest:,} inputs of a projection, so errors are those of a fit, not "
        f"a prediction; use more samples ({2 * widest:,} tokens or more)"
    ]


def extreme_line(prepared: Prepared) -> str | None:
    """Say that nothing goes, or that so little stays that the model is ruined; None of all between."""
    return next((line for stage in stages_of(prepared.whole.recipe) if (line := stage.extreme_line(prepared))), None)


def kept_line(prepared: Prepared) -> str | None:
    """Say what stays of blocks, dimensions and units; None where all do."""
    return "; ".join(filter(None, (stage.kept_words(prepared) for stage in stages_of(prepared.whole.recipe)))) or None


def ignored_words(model: Model) -> str:
    """Say how many tensors of a checkpoint its class does not load, and name some."""
    names = sorted(model.checkpoint.ignored)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    numbers = sum(info.numel for info in model.checkpoint.ignored.values())
    return (
        f"transformers' {model.family.architecture} does not load {plural(len(names), 'tensor')} "
        f"({human_count(numbers)} numbers; {', '.join(names[:_NAMED])}{more})"
    )


def tied_words(model: Model) -> str | None:
    """Say how stored tensors differ from what the config ties; None if they do not."""
    seen = model.checkpoint
    if TIE_KEY in seen.stated:
        return (
            f"config.json ties tensors that are stored and differ: transformers' {model.family.architecture} takes "
            "them as they are stored, and outputs say tie_word_embeddings: false"
        )
    lines = [
        f"{new} is stored as {old}, which config.json ties to it: outputs store {new}"
        for new, old in seen.copies.items()
    ]
    twice = sorted(seen.shadowed.keys() - seen.copies.values())
    if twice:
        names = ", ".join(twice)
        lines.append(f"config.json ties {names} to a tensor that is stored with the same values: outputs store one")
    return "; ".join(lines) or None


def unmeasured_lines(prepared: Prepared) -> Iterable[str]:
    """Say what a dry run cannot know because it is measured, on which data, and which command shows it earlier."""
    model, recipe = prepared.model, prepared.recipe
    if not prepared.foreseen and not prepared.whole.lacks_moments:
        return
    stages = stages_of(prepared.whole.recipe)
    images = model.family.modality == "image"
    what = ", and then ".join(dict.fromkeys(filter(None, (stage.measured_words for stage in stages))))
    if recipe.weighed_by_effect:
        what += ", and what pruning each does to the model's output"
    if prepared.live is None:
        usual, data = usual_samples(model), asked_data(model.family.modality)
        most = {
            "text": f"{usual} windows of {model.tokens} tokens",
            "pairs": f"up to {usual} pairs of at most {model.tokens} tokens each side",
            "image": f"up to {usual} images",
            "audio": f"up to {usual} sounds",
        }[model.family.modality]
        others = "" if prepared.whole.recipe.changes_model else ", or --statistics STATS"
        yield f"to be measured: {what}; give {data} for it ({most}, unless you say --samples){others}"
    else:
        samples = prepared.live.samples
        windows = f"{plural(len(samples), 'window')} of {samples.tokens} tokens"
        count = plural(len(samples), "image") if images else windows
        yield f"to be measured first: {what}, on {count} of {prepared.live.source}"
    if prepared.foreseen and not prepared.whole.recipe.changes_model and is_plannable(recipe):
        yield (
            f"`{recipe.calibration}` and then `ckpt-prune plan --statistics STATS` show the widths and the predicted "
            "error of every layer before anything is pruned"
        )


def wider_choice(prepared: Prepared) -> str | None:
    """Say what widths per block would gain, if no recipe was named and all blocks got the same widths; or None."""
    recipe = prepared.recipe
    if not prepared.job.by_default or (recipe.name, recipe.widths) != (DEFAULT_RECIPE, "uniform"):
        return None
    if prepared.model.checkpoint.within is not None:
        return None  # a part has no code of its own
    try:
        wider = type(recipe).model_validate(prepared.whole.recipe.model_dump(by_alias=True) | {"widths": "per_layer"})
        fit_to_runtimes(wider, prepared.model, Notices())
    except (ValidationError, UserError):
        return None  # what else was asked for, such as quantize, refuses it
    losses = prepared.decisions.losses
    beginning = f"widths per block (--recipe {WIDER_CHOICE}) would lose"
    exported = recipe.runs_on and all(RUNTIMES[name].export for name in recipe.runs_on)  # which reads no code
    has_code = prepared.container_known and prepared.output.container.remote_class is not None
    remote = "" if exported or has_code else ", and need remote code"
    if losses is None:
        return f"{beginning} less{remote}"
    if losses.chosen - losses.per_block <= _ALIKE * losses.chosen:
        return f"{beginning} as much, as predicted"
    saved = 1 - losses.per_block / losses.chosen
    return f"{beginning} less (predicted: {saved:.0%} less){remote}"
