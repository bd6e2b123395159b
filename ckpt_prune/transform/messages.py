"""What a user should know of a job beside its sizes, in lines."""

from ckpt_prune.report.reading import report_of
from ckpt_prune.sparsity.patterns import mask_words
from ckpt_prune.transform.settle import Settled


def messages(settled: Settled) -> list[str]:
    """What a user should know of a job beside its sizes."""
    found = []
    request, recipe = settled.request, settled.recipe
    if recipe.target != "dense" and not request.sequential and request.statistics is not None and request.plan is None:
        kind = "sequential" if recipe.target == "sequential" else "drift-correcting"
        found.append(f"recipe {recipe.name} is {kind}; with --statistics its dense-cache variant is used")
    if settled.output.container.note:
        found.append(settled.output.container.note)
    made = report_of(settled.model.checkpoint.path)
    if made is not None and made.mask is not None:
        masked = mask_words(made.mask.method, made.mask.pattern)
        found.append(
            f"this model was masked before ({masked}): what is rewritten now loses those zeros, and another mask "
            "chooses anew; see `ckpt-prune inspect OUT --sparsity`"
        )
    few = few_tokens(settled, errors="below")
    if few:
        found.append(few)
    return found


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
