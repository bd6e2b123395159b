"""Prunes that several processes do together."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.stages import FullRecipe
from tests import families
from tests.interrupting import interrupt_at
from tests.pairs import choose_cases, every
from tests.parallel.threads import in_threads

MASK = {"version": 1, "name": "masked", "mask": {"method": "sparsegpt", "pattern": "1:2"}, "target": "sequential"}
RECIPES = {
    "sequential": families.recipe("ridge", lam=0.01, target="sequential"),
    "drift": families.recipe("ridge", lam=0.01, target="drift"),
    "mask": FullRecipe.model_validate(MASK),
    "by perplexity": families.recipe("ridge", search={"lambda_by": "perplexity", "lambda_grid": [0.001, 10.0]}),
    "widths by error": families.recipe(
        "ridge", lam=0.01, target="drift", allocation="least-error", widths="per_layer", container="any"
    ),
}


def prune_together(
    folder: Path, out: Path, size: int, recipe: FullRecipe, *, statistics=None, samples: int = 7, **options
):
    """An output that so many processes have made together, and what each of them says of it."""
    live = None if statistics is not None else families.windows(samples)

    def work(_group):
        return families.prune(families.job_on(folder, recipe, statistics, live, folds=2), out, **options)

    return in_threads(size, work)


def assert_alike(a: Path, b: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (a, b))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        assert torch.allclose(tensor, theirs[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("kind", every(2, RECIPES))
def test_as_one_process_would(tmp_path, kind):
    folder = families.make(tmp_path / "dense", "mistral")
    one = prune_together(folder, tmp_path / "one", 1, RECIPES[kind])
    two = prune_together(folder, tmp_path / "two", 2, RECIPES[kind])
    assert_alike(tmp_path / "one", tmp_path / "two")
    assert two[0] == two[1]  # every process knows the report
    for key in ("before", "after", "recipe"):
        assert one[0][key] == two[0][key]
    assert not (tmp_path / "two.partial").exists()


def test_blocks_that_do_not_depend_on_each_other_are_dealt_out(tmp_path):
    folder = families.make(tmp_path / "dense", "llama-gqa-tied")
    statistics = families.calibrate(folder, tmp_path / "stats", folds=2)
    recipe = families.recipe("ridge", lam=0.01)
    blocks_of_rank: dict[int, list[int]] = {}

    def work(group, out):
        settled = families.job_on(folder, recipe, statistics)
        blocks = blocks_of_rank.setdefault(group.rank, [])
        read = settled.model.read_block
        object.__setattr__(settled.model, "read_block", lambda block: blocks.append(block) or read(block))
        return families.prune(settled, tmp_path / out)

    in_threads(1, lambda group: work(group, "one"))
    blocks_of_rank.clear()
    in_threads(2, lambda group: work(group, "two"))
    assert {rank: sorted(set(blocks)) for rank, blocks in blocks_of_rank.items()} == {0: [0, 2], 1: [1]}
    assert families.contents(tmp_path / "one") == families.contents(tmp_path / "two")


@pytest.mark.parametrize(
    "kind", choose_cases(["sequential", "dealt out", "widths by error"], lambda kind: kind != "widths by error")
)
def test_another_number_of_processes_goes_on(tmp_path, monkeypatch, kind):
    folder = families.make(tmp_path / "dense", "llama-gqa-tied")
    dealt = kind == "dealt out"
    statistics = families.calibrate(folder, tmp_path / "stats", folds=2) if dealt else None
    recipe = families.recipe("ridge", lam=0.01) if dealt else RECIPES[kind]
    prune_together(folder, tmp_path / "whole", 1, recipe, statistics=statistics)
    with monkeypatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 3)
        with pytest.raises(KeyboardInterrupt):
            prune_together(folder, tmp_path / "out", 2, recipe, statistics=statistics)
    assert (tmp_path / "out.partial").is_dir()
    prune_together(folder, tmp_path / "out", 3, recipe, statistics=statistics, resume=True)
    assert_alike(tmp_path / "whole", tmp_path / "out")
    # What is done is done, for any number of them.
    messages: list[str] = []
    prune_together(folder, tmp_path / "out", 2, recipe, statistics=statistics, resume=True, announce=messages.append)
    assert messages == [f"{tmp_path / 'out'} is finished: nothing is left to do"]


@pytest.mark.parametrize(
    ("more", "does"),
    [
        ({"mask": {"method": "magnitude", "pattern": "1:2"}, "rotation": {"kind": "shared"}}, "rotates"),
        ({"mask": {"method": "magnitude", "allocation": "alpha"}, "ratio": 0.5}, "shares a mask's zeros out"),
    ],
    ids=["rotation", "shares"],
)
def test_what_one_process_does_alone_is_refused(tmp_path, more, does):
    folder = families.make(tmp_path / "dense")
    recipe = FullRecipe.model_validate({**MASK, "target": "dense", **more})
    with pytest.raises(UserError) as caught:
        prune_together(folder, tmp_path / "out", 2, recipe, samples=4)
    assert str(caught.value) == f"recipe masked {does}, which one process does alone: start it without torchrun"


def test_processes_at_other_jobs_are_refused(tmp_path):
    folder = families.make(tmp_path / "dense")

    def work(group, recipes=None, seeds=(5, 5)):
        recipe = families.recipe("none", target="sequential") if recipes is None else recipes[group.rank]
        job = families.job_on(folder, recipe, None, families.windows(4, seed=seeds[group.rank]))
        return families.prune(job, tmp_path / "out")

    with pytest.raises(UserError, match=r"^rank 1 has another text than rank 0"):
        in_threads(2, lambda group: work(group, seeds=(5, 6)))
    with pytest.raises(UserError, match=r"^rank 1 has another recipe than rank 0"):
        in_threads(2, lambda group: work(group, [RECIPES["sequential"], RECIPES["drift"]]))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
