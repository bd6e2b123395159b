"""The model card of an output."""

from pydantic import ValidationError

from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.common.formatting import human_bytes, human_count, plural
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.job.front_matter import front_matter, metadata, sentence_class_of
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.report import Report
from ckpt_prune.job.sizes import TargetSize
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.report.adapters import is_recovered, told_of
from ckpt_prune.report.depth import depth_lines, named_all
from ckpt_prune.report.figures import (
    Likeness,
    cost_changes,
    factor_figures,
    mask_figures,
    recovery_figures,
    shares_line,
)
from ckpt_prune.report.hidden import dimensions_line, hidden_lines
from ckpt_prune.report.latency import latency_line
from ckpt_prune.report.tried import tried_table
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.ratio_gaps import is_far

_PACKED = (
    "For 2:4 `torch.sparse.to_sparse_semi_structured` does, on NVIDIA GPUs of compute capability 8.0 or later; vLLM "
    "removed its support of 2:4."
)

_LACO = "LaCo: Layer-wise Compensation for Pruned Large Language Models, ACL 2026 long.1342"

_UNITS = {
    "qk": "dimensions of queries and keys",
    "queries": "query heads inside KV groups",
    "heads": "heads, or KV groups",
    "values": "directions of values",
    "mlp": "columns of the MLP",
}
"""What units of a space are, for readers of a card."""

_LIKENESS: dict[Likeness, str] = {"mse": "mean squared error of the hidden states", "cka": "their linear CKA"}
_CHANGED = "; it was changed here, and `ckpt_prune.json` has it as it was used."


def model_card(report: Report) -> str:
    """README.md of an output, from its report: what it is, how it was made, how to load it."""
    recipe, container = report.recipe, report.container
    lines = [
        *front_matter(metadata(report)),
        "",
        f"# {as_markdown(f'{report.source.name}, {_how(report)}')}",
        "",
        f"{as_markdown(f'Made by ckpt_prune {report.ckpt_prune}')} from {as_code(report.source.name)}. "
        f"{as_markdown(recipe.summary)}{_beside_shipped(report)}".rstrip(),
        f"Source of the method: {as_markdown(recipe.source)}." if recipe.source else "",
        *([f"The recipe's file: {as_code(report.origin.pinned)}."] if report.origin is not None else []),
        "",
        "| | before | after | share |",
        "|---|---|---|---|",
    ]
    for cost in cost_changes(report.before, report.after):
        show = human_bytes if cost.key in ("bytes", "cache") else human_count
        names = {"flops": f"FLOPs of a sample of {report.before.tokens} tokens", "cache": "KV cache of a token"}
        lines.append(
            f"| {names.get(cost.key, cost.key)} | {show(cost.before)} | {show(cost.after)} | {cost.share:.1%} |"
        )
    lines += [
        "",
        *_latency(report),
        *_calibration(report),
        *_depth(report),
        *_hidden(report),
        *_tried(report),
        *_kept(report),
        *_coarse(report),
        *_mask(report),
        *_factored(report),
        *_rotation(report),
        *_recovery(report),
        *told_of(report),
    ]
    if container.note:
        lines.append(f"Container: {as_markdown(container.note)}.")
    if container.remote_code:
        lines.append("Load it as below: `from_pretrained` of every other class refuses it.")
    auto = container.auto_class
    loader = (
        'import ckpt_prune  # without running the code in the folder\n\nmodel = ckpt_prune.load("PATH")\n\n'
        f"from transformers import {auto}  # without ckpt_prune\n\n"
        f'model = {auto}.from_pretrained("PATH", trust_remote_code=True)'
        if container.remote_code
        else f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("PATH")'
    )
    sentence_class = sentence_class_of(report)
    if sentence_class is not None:
        trusted = ", trust_remote_code=True" if container.remote_code else ""
        what = "scores of pairs of texts" if sentence_class == "CrossEncoder" else "embeddings of texts"
        loader += f"\n\nfrom sentence_transformers import {sentence_class}  # for {what}\n\n"
        loader += f'model = {sentence_class}("PATH"{trusted})'
    lines += ["", "```python", loader, "```", "", _record(report), ""]
    return "\n".join(lines)


def _how(report: Report) -> str:
    """What was done, in the words of a heading."""
    recipe = report.recipe
    pruned = recipe.name if recipe.elsewhere else f"pruned by recipe {recipe.name}"
    if report.part is not None:
        pruned = f"its {report.part} part {pruned}"
    return f"{pruned} and recovered" if is_recovered(report) else pruned


def _latency(report: Report) -> list[str]:
    """What it takes, where its size is a time."""
    told = None if report.latency is None else latency_line(report.latency)
    return [] if told is None else [f"{as_markdown(f'{told[0].upper()}{told[1:]}')}, on the machine that pruned it."]


def _calibration(report: Report) -> list[str]:
    """What moments were measured on."""
    calibration = report.calibration
    window = calibration.amount("window")
    if window is None:
        return []
    what = "images" if calibration.text("modality") == "image" else "windows"
    return [
        f"Calibrated on {calibration.amount('samples')} {what} of {window} tokens, "
        f"target {as_markdown(str(calibration.text('target')))}."
    ]


def _depth(report: Report) -> list[str]:
    """Which whole blocks are gone, in a picture, and what makes up for them."""
    depth = report.depth
    if depth is None or not depth.gaps:
        return []
    what, *gaps = depth_lines(depth)
    told = as_markdown("; ".join(gaps))
    head = "Whole blocks are gone, and those that stay are numbered anew"
    if depth.part != "block":
        head = f"The {depth.part} of some blocks gives nothing: its last projection is zeros there"
    found = [f"{head}: {named_all(depth)}.", "", "```", what, "```"]
    return [*found, "", f"{told[0].upper()}{told[1:]}." if told else "", ""]


def _hidden(report: Report) -> list[str]:
    """How many dimensions of the residual stream are left, and in which bases."""
    if report.hidden is None:
        return []
    told = "; ".join([dimensions_line(report.hidden), *hidden_lines(report.hidden)])
    if report.hidden.kind == "per-block":
        told += "; matrices on the skip connections take the stream from one basis to the next"
    return [f"{told[0].upper()}{told[1:]}."]


def _tried(report: Report) -> list[str]:
    """What was held against each other."""
    found = tried_table(report.depth, report.hidden)
    if found is None:
        return []
    heading, *rows = (f"| {' | '.join(row)} |" for row in (found.headers, *found.rows))
    return ["", f"{found.title.capitalize()}:", "", heading, f"|{'---|' * len(found.headers)}", *rows, ""]


def _kept(report: Report) -> list[str]:
    """How many units of each space blocks have left."""
    told = []
    for space in dict.fromkeys(site.space for site in report.sites):
        own = [site for site in report.sites if site.space == space]
        counts = sorted({len(site.kept) for site in own})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        what = f" ({_UNITS[space]})" if space in _UNITS else ""
        told.append(f"{as_code(space)} {span} of {own[0].units}{what}")
    return [f"Units kept in each block: {', '.join(told)}."] if told else []


def _mask(report: Report) -> list[str]:
    """What was zeroed, and what that is good for."""
    mask, figures = report.mask, mask_figures(report.linears, report.recipe.damp)
    if mask is None or figures is None:
        return []
    sentences = [
        f"Mask by {as_markdown(mask.method)}, pattern {as_markdown(mask.pattern)}: {figures.share:.2%} zeros in "
        f"{figures.linears} linear weights of {human_count(figures.size)} parameters."
    ]
    shared = shares_line(mask)
    if shared is not None:
        sentences.append(f"{as_markdown(shared.capitalize())}.")
    if figures.zeros:
        sentences.append(
            "The tensors keep their dense shapes, zeros included, so size and speed are unchanged by the mask unless "
            "a runtime makes use of the zeros."
        )
    if figures.zeros and mask.pattern == "2:4":
        sentences.append(_PACKED)
    return [" ".join(sentences)]


def _factored(report: Report) -> list[str]:
    """Which linears are two thin ones."""
    found = factor_figures(report.factored)
    if found is None:
        return []
    return [
        f"{found.linears} linear modules are the product of two, of ranks {found.least} to {found.most}: "
        f"{found.left / found.size:.1%} of the {human_count(found.size)} parameters of their weights are left."
    ]


def _beside_shipped(report: Report) -> str:
    """How the recipe differs from the shipped one of its name: nothing, how much goes, or more than that."""
    name = report.recipe.name
    if name not in shipped_recipes():
        return ""
    shipped = load_recipe(name)
    if report.lambda_search is not None:  # that the strength was searched for is what the recipe says
        shipped = shipped.with_strength(report.lambda_search.chosen)
    if shipped.digest == report.recipe_digest:
        return ""
    told = " That is the shipped recipe of this name"
    used = _used(report)
    if used is None:
        return told + _CHANGED
    try:
        size = used.size if report.asked is None else TargetSize.model_validate(report.asked.size)
    except ValidationError:
        return told + _CHANGED
    if used.without_amount != shipped.without_amount:
        return told + _CHANGED
    if size is not None:
        return f"{told}, for {size.words}."
    ratios = {space: used.ratio_of(space) for space in used.spaces}
    if len(set(ratios.values())) > 1:
        return f"{told}, at ratios of {', '.join(f'{ratio:g} ({space})' for space, ratio in ratios.items())}."
    return f"{told}, at a ratio of {next(iter(ratios.values()), used.ratio):g}."


def _used(report: Report) -> Recipe | None:
    """The recipe as it was used; None where it is of another version, or another tool pruned."""
    try:
        return FullRecipe.model_validate(report.recipe.model_dump(mode="json"))
    except ValidationError:
        return None


def _coarse(report: Report) -> list[str]:
    """Where another share of the units went than the recipe asks for, which are too few to divide so."""
    used = _used(report)
    if used is None or used.allocation != "uniform" or used.size is not None or report.asked is not None:
        return []
    sentences = []
    for space, own in used.spaces.items():
        pruned = used.blocks(1 + max((site.block for site in report.sites), default=0))
        site = next((site for site in report.sites if site.space == space and site.block in pruned), None)
        if site is None:
            continue
        asked, dropped = used.ratio_of(space), site.units - len(site.kept)
        if is_far(asked, dropped / site.units):
            steps = f" in multiples of {own.multiple_of}" if own.multiple_of > 1 else ""
            gone = f"{dropped} ({dropped / site.units:.3g}) went" if dropped else "none went"
            sentences.append(
                f"Space `{space}` has {plural(site.units, 'unit')} per block{steps}, too coarse for a ratio of "
                f"{asked:g}: {gone}."
            )
    return [" ".join(sentences)] if sentences else []


def _turns(report: Report) -> bool:
    """Whether the stream changes its basis as the model runs, by matrices between blocks or inside them."""
    if report.hidden is not None:
        return report.hidden.kind == "per-block"
    return report.rotation is not None and report.rotation.turns


def _rotation(report: Report) -> list[str]:
    """What was turned, and what of it remains at run time."""
    if report.rotation is None:
        return []
    kind = report.rotation.kind
    if kind == "values":
        what = (
            "the values of every head turn, which is absorbed by the weights before and after them and adds no "
            "computation at run time"
        )
    elif _turns(report):
        what = (
            "every block has its own basis of the residual stream, so a d x d matrix per block (d is the width of the "
            "stream) turns the stream at run time, which takes remote code"
        )
    else:
        what = (
            "all blocks share one basis of the residual stream, which is absorbed by the weights and adds no "
            "computation at run time"
        )
    return [f"Rotation {as_markdown(kind)}: {what}."]


def _recovery(report: Report) -> list[str]:
    """What was trained towards which model, and how much nearer that brought the hidden states."""
    recovery, figures = report.recovery, recovery_figures(report.recovery, report.layers)
    if recovery is None or figures is None:
        return []
    which = "" if figures.only is None else f"{'MLP' if figures.only == 'mlp' else as_markdown(figures.only)} "
    where = "" if figures.layers is None else f" of layers {as_code(figures.layers)}"
    when = "each block right after it was pruned" if recovery.on_the_fly else "block by block after pruning"
    samples = "images" if figures.images else f"windows of {figures.window} tokens"
    sentences = [
        f"Recovered with {_LACO}: the {which}weights that pruning left{where} were trained towards the hidden states "
        f"of {as_code(recovery.dense.name)}, {when}, on {figures.samples} {samples}, {figures.held_out} of them held "
        f"out, up to {figures.epochs} epochs at a learning rate of {figures.lr:.3g}. {figures.recovered} of "
        f"{figures.blocks} blocks have new weights; zeros stay zero."
    ]
    if recovery.earlier is not None:
        sentences.append("It had been recovered before; that record is in `ckpt_prune.json` as `recovery.earlier`.")
    changes = [f"{_LIKENESS[name]} {means.before:.4g} -> {means.after:.4g}" for name, means in figures.means.items()]
    if changes:
        sentences.append(f"On {figures.tried_on} samples, mean over blocks, before -> after: {', '.join(changes)}.")
    return [" ".join(sentences)]


def _record(report: Report) -> str:
    """What else there is to read of the output."""
    if report.mask is not None:
        measured = any(linear.error is not None for linear in report.linears)
        what = "How much of every linear weight was zeroed"
        found = f"{what} and the error at its output are" if measured else f"{what} is"
    elif report.factored:
        return "The rank of every linear weight and the error at its output are in `ckpt_prune.json`."
    elif report.depth is not None and not report.recovery and not report.sites:
        return "Which blocks are gone, by which figures, and what makes up for them is in `ckpt_prune.json`."
    elif report.hidden is not None and not report.recovery:
        return "The share of the energy that stays in each basis is in `ckpt_prune.json`."
    elif report.recovery and not report.sites:
        return "Errors of every block before and after recovery are in `ckpt_prune.json`."
    else:
        found = "Kept units and errors of every layer are"
    found += " in `ckpt_prune.json`"
    if report.recovery:
        found += ", with errors of every block before and after recovery"
    if report.rotation is not None:
        found += ", with entropies before and after rotation; the rotations themselves, which no loader needs, are in "
        found += f"`{ROTATIONS}`"
    return f"{found}."
