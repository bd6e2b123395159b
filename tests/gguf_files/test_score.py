"""Choosing types of a file's matrices, and measuring files at every token in llama.cpp."""

import re

import pytest
import torch

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.gguf.choosing import TypeBudget
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.importance import importance_of_statistics
from ckpt_prune.gguf.losses import predict_type_losses
from ckpt_prune.gguf.score import read_reference, score_file
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.options.data import ProofOptions
from tests.gguf_files.tiny import save

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("score")


@pytest.fixture(scope="module")
def folder(place):
    return save(place / "model", "llama", hidden_size=64, intermediate_size=256, num_hidden_layers=2)


@pytest.fixture(scope="module")
def windows():
    return torch.randint(3, 2000, (4, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def statistics(folder, windows, place):
    model, samples = open_model(str(folder), Opening()), TokenWindows(windows)
    return measure_statistics(
        model, samples, place / "statistics", seed=0, folds=1, collect=("moments", "linears"), **CPU
    )


@pytest.fixture(scope="module")
def budget(folder, windows, statistics):
    pytest.importorskip("libgguf")
    model = open_model(str(folder), Opening())
    importance = importance_of_statistics(statistics, model, "q8_0")
    losses = predict_type_losses(model, TokenWindows(windows), importance, "q8_0", **CPU)
    return TypeBudget(FilePlanner(model), losses)


@pytest.fixture(scope="module")
def reference(folder, windows):
    return read_reference(folder, windows)


def write(folder, place, statistics, choice):
    proving = ProofOptions()
    how = {"proof": False, "statistics": statistics.folder, "overwrite": True}
    export_gguf(str(folder), place, proving, kind=choice.chosen, others=choice.others, **how)
    return place


def test_a_file_of_the_same_weights_predicts_the_same(folder, place, reference, windows):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    export_gguf(str(folder), place / "same.gguf", ProofOptions(), kind="f32", proof=False)
    score = score_file(place / "same.gguf", reference)
    assert score.kl < 1e-5
    assert score.top1 > 0.99
    assert score.accepted == pytest.approx(1, abs=2e-3)
    dense = perplexity(load_model(folder, device="cpu", dtype=torch.float32), windows).perplexity
    assert reference.perplexity == pytest.approx(dense, rel=1e-5)
    assert score.perplexity == pytest.approx(dense, rel=1e-3)
    assert min(score.speeds) > 0


def test_types_keep_to_the_bytes_of_a_file_and_lose_what_is_predicted(folder, place, statistics, budget, reference):
    """Second order and a handful of labels: within a factor of two, as the tiny model has huge errors."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    whole = budget.of({name: max(kinds, key=lambda kind: -kinds[kind]) for name, kinds in budget.losses.items()})
    limit = (budget.least + whole.bytes) // 2
    choice = budget.at_bytes(limit)
    file = write(folder, place / "chosen.gguf", statistics, choice)
    assert file.stat().st_size == choice.bytes
    assert 0.98 * limit < choice.bytes <= limit
    assert 0.5 < score_file(file, reference).kl / choice.kl < 2


def test_the_smallest_file_within_a_loss_is_no_larger_than_one_that_loses_as_much(budget):
    choice = budget.at_bytes((3 * budget.least) // 2)
    smallest = budget.at_loss(choice.kl)
    assert smallest.bytes <= choice.bytes
    assert smallest.kl <= choice.kl
    with pytest.raises(BudgetError):
        budget.at_bytes(budget.least - 1)


def test_every_matrix_is_named_once(budget):
    choice = budget.at_bytes((5 * budget.least) // 4)
    assert sum(map(int, re.findall(r" in (\d+)", choice.words()))) == 2 * 7
