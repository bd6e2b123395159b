"""Sizes met by one ratio and the finest space, against all widths that such a model could have."""

import re
from functools import cache
from pathlib import Path

import pytest

from ckpt_prune.job.decisions import Decisions
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.stages.recipe_files import load_recipe
from tests import families
from tests.encoders import job_on
from tests.job.test_cost import LLAMA_7B
from tests.refusals import refusal
from tests.stages.whole import make_wide

GROUPS, COLUMNS = 3, 24
KINDS = {"params": "parameters", "bytes": "bytes", "flops": "flops"}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV groups, each of which is a third of the attention, and 24 columns."""
    return make_wide(
        tmp_path_factory.mktemp("three") / "dense", "mistral", num_attention_heads=6, num_key_value_heads=GROUPS
    )


def settle(folder: Path, size: str, *changes: str, kind: str = "params", recipe: str = "magnitude") -> Prepared:
    return job_on(folder, load_recipe(recipe, changes, size={kind: size}))


@cache
def size_at(folder: Path, heads: int, mlp: int, kind: str = "params") -> int:
    """The size of a model of these widths, from the shapes of its tensors."""
    model = Model.open(folder)
    shapes = model.shapes_at([{"heads": heads, "mlp": mlp}] * model.blocks)
    return getattr(cost_of(model, shapes), KINDS[kind])


def widths(job: Prepared) -> tuple[int, int]:
    (pair,) = {(width["heads"], width["mlp"]) for width in job.widths}
    return pair


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [40, 62, 81, 100])
def test_no_wider_column_would_fit(three, share, kind):
    job = settle(three, f"{share}%", kind=kind)
    limit = size_at(three, GROUPS, COLUMNS, kind) * share // 100
    heads, mlp = widths(job)
    reached = getattr(job.after, KINDS[kind])
    assert reached == size_at(three, heads, mlp, kind) <= limit
    assert mlp == COLUMNS or size_at(three, heads, mlp + 1, kind) > limit


@pytest.mark.parametrize("share", [45, 58, 66, 74, 78, 88])
def test_the_coarse_space_is_as_the_ratio_says_and_the_columns_are_near_it(three, share):
    """The coarse space keeps that of the two counts around the size limit for which the columns move less."""
    job = settle(three, f"{share}%")
    limit = size_at(three, GROUPS, COLUMNS) * share // 100
    by_ratio = []
    for step in range(1_000):  # columns in steps of 1/24 and groups of 1/3 tell no finer ones apart
        ratio = step / 1_000
        heads = GROUPS - int(GROUPS * ratio + 1e-9)
        mlp = COLUMNS - -int(-(COLUMNS * ratio - 1e-9) // 1)
        if heads < 1 or mlp < 1:
            break
        by_ratio.append((heads, mlp))
        if size_at(three, heads, mlp) <= limit:
            break
    options = []
    for heads, mlp in by_ratio[-2:]:
        fitting = [width for width in range(1, COLUMNS + 1) if size_at(three, heads, width) <= limit]
        if fitting:
            options.append((abs(fitting[-1] - mlp), (heads, fitting[-1])))
    assert widths(job) == min(options, key=lambda option: option[0])[1]


def test_the_space_of_the_smallest_steps_makes_up_for_the_rest(three):
    """Columns in steps of 24 are coarser than groups."""
    job = settle(three, "80%", "spaces.mlp.multiple_of=24")
    limit = size_at(three, GROUPS, COLUMNS) * 8 // 10
    heads, mlp = widths(job)
    assert mlp == COLUMNS
    assert size_at(three, heads, mlp) <= limit < size_at(three, heads + 1, mlp)


@pytest.mark.parametrize(
    ("size", "kind", "hint"),
    [
        ("70", "params", ": did you mean 70%?"),
        ("100", "flops", ": did you mean 100%?"),
        ("101", "params", ""),
        ("70B", "bytes", ""),
    ],
)
@pytest.mark.parametrize("recipe", ["magnitude", "wanda-sp"])
def test_a_bare_number_that_reads_like_a_percentage(three, size, kind, hint, recipe):
    changes = () if recipe == "magnitude" else ("spaces.heads.score=magnitude", "spaces.mlp.score=magnitude")
    line = refusal(settle, three, size, *changes, kind=kind, recipe=recipe)
    reached = line.partition(" at the least, ")[2].partition("% of ")[2].lstrip("0123456789,")
    assert re.sub(r" \(parameters: .*?\)", "", reached) == hint


# ---- blocks that stay whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llm-pruner-taylor1", "llm-pruner-taylor2"])
def test_llm_pruner_prunes_the_blocks_of_its_authors_command(name):
    """A quarter of the heads and columns of blocks 4 to 29 of LLaMA-7B, which they call LLaMA-5.4B."""
    block = 4 * 4096 * 4096 + 3 * 4096 * 11008
    model, recipe = families.model_of(LLAMA_7B), load_recipe(name)
    widths = Decisions(recipe).widths(model)
    assert [block for block, block_widths in enumerate(widths) if block_widths != {"heads": 32, "mlp": 11008}] == list(
        range(4, 30)
    )
    assert widths[4] == {"heads": 24, "mlp": 8256}
    assert cost_of(model).parameters - cost_of(model, model.shapes_at(widths)).parameters == 26 * block // 4
    assert round(cost_of(model, model.shapes_at(widths)).parameters / 1e9, 1) == 5.4
