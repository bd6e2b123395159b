"""What blocks and dimensions of the residual stream take to go, before anything else does (`estimate`)."""

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sublayers import sublayers
from ckpt_prune.calibration.choosing import DEFAULT_WINDOWS
from ckpt_prune.calibration.distances import SAMPLES
from ckpt_prune.calibration.fisher import LIMITS
from ckpt_prune.calibration.losses import TOKENS
from ckpt_prune.planning.depth_recipe import DepthRecipe
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.rotations.sliced import SlicedCheckpoint
from ckpt_prune.transform.joint import FIRST, MORE
from ckpt_prune.transform.pair_search import LIMIT
from ckpt_prune.transform.request import Request, Shortened
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.work import (
    Shape,
    Site,
    Stage,
    Work,
    back,
    back_of_logits,
    blended,
    held_out,
    moments,
    refitted,
)


def weighs(recipe: Recipe) -> bool:
    """Whether amounts of an axis are held against each other: then the unpruned model is what is measured."""
    return (recipe.depth is not None and recipe.depth.auto) or (recipe.hidden is not None and recipe.hidden.auto)


def stages_before(settled: Settled) -> tuple[list[Stage], int]:
    """Stages of what goes before units of spaces do, and the scratch that it takes on disk.

    Args:
        settled: a job that lacks blocks, dimensions or both. Without samples the default number stands for them.
    """
    request = settled.request
    shortened, narrowed = request.shortened, request.narrowed
    stages: list[Stage] = []
    scratch = 0
    if weighs(request.whole.recipe):
        stages.append(_weighing(request.whole))
    if shortened is not None and shortened.whole.recipe.depth is not None:
        stages.append(_depth(shortened))
    if narrowed is not None and not narrowed.idle:
        view = narrowed.view or narrowed.into
        stage, scratch = _hidden(narrowed.whole, view, narrowed.record.kept)
        stages.append(stage)
    return stages, scratch


def absorbing(shape: Shape, view: SlicedCheckpoint) -> Work:
    """Every matrix multiplied by its basis, in float64; a table a few rows at a time."""
    return Work(wide=2 * view.kept * (shape.weights * shape.blocks + (2 * shape.outside if view.shared else 0)))


def _data(request: Request) -> tuple[int, int]:
    """Samples, and tokens of each."""
    live = request.live
    return (DEFAULT_WINDOWS, request.model.tokens) if live is None else (len(live.samples), live.samples.tokens)


def _depth(shortened: Shortened) -> Stage:
    """Which blocks go, and the maps in their place."""
    whole, gaps = shortened.whole, shortened.record.gaps
    depth = whole.recipe.depth
    assert depth is not None
    shape = Shape.of(whole.model)
    samples, tokens = _data(whole)
    work, held = Work(), shape.block_bytes + shape.activations(tokens)
    few = min(samples, LIMITS[whole.model.family.modality] if depth.choice == "divergence" else SAMPLES)
    chosen = whole.statistics is None and whole.plan is None
    if chosen and depth.choice == "loss":
        few = min(samples, max(1, TOKENS // tokens))
        runs = (shape.read() + shape.run(few, tokens) * (shape.blocks / 2) + shape.logits(few * tokens)) * shape.blocks
        work += runs * sum(gap.blocks for gap in gaps)
        held += shape.states(few, tokens) * shape.blocks
    elif chosen and depth.choice is not None:
        each = shape.read() + shape.run(few, tokens)
        if depth.choice == "divergence":
            each = back(shape, few, tokens)
            work += back_of_logits(shape, few * tokens)
        work += each * shape.blocks + Work(moved=4 * few * tokens * shape.hidden * shape.blocks**2)
        held += shape.states(few, tokens) * (shape.blocks + 2)
    if depth.compensation.linear:
        # Where the number of blocks is measured, there may be a gap.
        work += _mapped(shape, samples, tokens, 1 if depth.auto else len(gaps), _strengths(depth))
        held = max(held, 3 * shape.states(samples, tokens) + shape.block_bytes + shape.activations(tokens))
    return Stage("depth", work, held)


def _strengths(depth: DepthRecipe) -> int:
    """How many strengths of a map are held against each other; none where one is given."""
    return len(depth.compensation.grid) if depth.compensation.lambda_by is not None else 0


def _mapped(shape: Shape, samples: int, tokens: int, gaps: int, strengths: int) -> Work:
    """Maps in place of gaps, of the best of so many strengths, or of a fixed one where there are none."""
    site = Site(shape.hidden, shape.hidden, shape.hidden, shape.hidden)
    work = (shape.read() + shape.run(samples, tokens)) * shape.blocks
    work += (moments(samples * tokens, shape.hidden, gram=True) * 2 + refitted(site)) * gaps
    return work + held_out(site, strengths, 1) * (4 * gaps) if strengths else work


def _hidden(request: Request, view: SlicedCheckpoint | None, kept: int) -> tuple[Stage, int]:
    """The bases of a stream, and what they take on disk.

    Args:
        request: whose stream it is.
        view: of it; None where how many dimensions go is measured first.
        kept: dimensions that stay.
    """
    shape, places = Shape.of(request.model), len(sublayers(request.model))
    samples, tokens = _data(request)
    count, d, bases = samples * tokens, shape.hidden, places * shape.blocks
    work = _grams(request.model, shape, samples, tokens)
    if view is None or view.shared:
        work += Work(eigen=d**3)
    else:
        work += Work(eigen=d**3) * bases
        if request.whole.recipe.target == "sequential":
            work += Work(gemm=4 * count * d * kept, moved=12 * count * d) * bases
    # A Gram, its factors in float64, and the bases of a block.
    held = shape.states(samples, tokens) + shape.block_bytes + shape.activations(tokens) + 8 * (4 + places) * d * d
    scratch = 4 * d * kept * (1 if view is None or view.shared else bases)
    return Stage("hidden", work + Work(disk=scratch), held), scratch


def _grams(model: Model, shape: Shape, samples: int, tokens: int) -> Work:
    """What norms make of the stream, wherever a sub-layer reads it: a block runs once more for its second."""
    places = len(sublayers(model))
    count, d = samples * tokens, shape.hidden
    work = (shape.read() + shape.run(samples, tokens) * places) * shape.blocks
    return work + Work(single=2 * count * d * d, moved=12 * count * d) * (places * shape.blocks)


def _weighing(request: Request) -> Stage:
    """A few models of the size made of few samples, and run on few others."""
    recipe, model = request.recipe, request.model
    shape = Shape.of(model)
    samples, tokens = _data(request)
    few = min(samples, LIMITS[model.family.modality])
    depth, hidden = recipe.depth, recipe.hidden
    both = depth is not None and hidden is not None
    each = (shape.read() + shape.run(few, tokens)) * shape.blocks + shape.logits(2 * few * tokens)
    for site in shape.sites.values():
        each += (blended(site) + refitted(site)) * shape.blocks
    if depth is not None and depth.auto and depth.compensation.linear:
        each += _mapped(shape, few, tokens, 1, _strengths(depth))
    if hidden is not None:
        each += Work(wide=2 * shape.hidden * (shape.weights * shape.blocks + 2 * shape.outside))
    times = LIMIT if both else FIRST + MORE
    work = each * times
    if hidden is not None:  # the stream of one model, or of what each number of blocks leaves
        work += _grams(model, shape, few, tokens) * (times if both else 1)
    held = 2 * shape.states(few, tokens) + 2 * shape.block_bytes + shape.activations(tokens) + 8 * 6 * shape.widest**2
    return Stage("hidden" if depth is None else "depth", work, held)
