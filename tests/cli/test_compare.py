"""`compare`: figures against whole stock models, exact output, the page, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import similarity as oracle
from sklearn.metrics.pairwise import paired_cosine_distances
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.runner import compare as comparing
from tests.cli.running import TEXT, ok, read_refusal

BOTH = ("compare", "dense", "pruned", *TEXT)


def whole(folder: str, ids: torch.Tensor) -> tuple[list[np.ndarray], torch.Tensor]:
    """Return the states that leave every block of a stock model, and its log-probabilities."""
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return [state.flatten(0, 1).double().numpy() for state in seen], functional.log_softmax(logits.double(), -1)


@pytest.mark.usefixtures("place")
def test_figures_are_those_of_whole_models(monkeypatch):
    taken, chosen = [], comparing.choose_samples
    monkeypatch.setattr(comparing, "choose_samples", lambda *a, **k: taken.append(chosen(*a, **k)) or taken[-1])
    comparison = json.loads(ok(*BOTH, "--json"))
    ids = taken[0].batch(slice(0, len(taken[0])))["input_ids"]
    (theirs, p), (ours, q) = whole("dense", ids), whole("pruned", ids)
    assert len(comparison["blocks"]) == len(theirs) == 2
    for block, a, b in zip(comparison["blocks"], theirs, ours, strict=True):
        figures = [block[name] for name in ("mse", "relative_error", "cosine", "cka")]
        relative, cosine = ((b - a) ** 2).sum() / (a**2).sum(), 1 - paired_cosine_distances(a, b).mean()
        expected = oracle.mse(a, b), relative, cosine, oracle.cka(a, b)
        assert figures == pytest.approx(expected, rel=1e-4)
    check_shares(comparison["blocks"], ids)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert comparison["divergence"] == pytest.approx(kl, rel=1e-4)
    assert {name: comparison[name] for name in ("reference", "model", "samples", "tokens_per_sample", "measure")} == {
        "reference": "dense",
        "model": "pruned",
        "samples": 8,
        "tokens_per_sample": 16,
        "measure": "kl",
    }


def check_shares(blocks: list[dict[str, float | None]], ids: torch.Tensor) -> None:
    """The dense model's blocks on the states of the pruned model's, by whole models and hooks in float64."""
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64) for name in ("dense", "pruned")]
    made: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    swap: dict[int, torch.Tensor] = {}
    for number, model in enumerate(models):
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _m, a, o, n=number: made[n].append((a[0], o)))
        with torch.no_grad():
            model(input_ids=ids)
    entered = [pair[0] for pair in made[1]]
    for at, layer in enumerate(models[0].model.layers):
        layer.register_forward_pre_hook(lambda _m, a, b=at: (entered[b], *a[1:]))
        layer.register_forward_hook(lambda _m, _a, o, b=at: swap.update({b: o}))
    with torch.no_grad():
        models[0](input_ids=ids)
    for at, block in enumerate(blocks):
        (h, end), (h_, end_) = made[0][at], made[1][at]
        expected = float((end - swap[at]).norm() / end.norm()), float((swap[at] - end_).norm() / end.norm())
        assert (block["input_error"], block["local_error"]) == pytest.approx(expected, rel=1e-4)
        if at == 0:
            assert block["growth"] is None
        else:
            assert block["growth"] == pytest.approx(float((end - swap[at]).norm() / (h - h_).norm()), rel=1e-4)


@pytest.mark.usefixtures("place")
def test_the_page():
    output = ok(*BOTH, "--plot", "page.html")
    assert output.endswith("drawn in page.html\n")
    page = Path("page.html").read_text()
    for name in ("MSE", "relative error", "cosine", "CKA"):
        assert f"<h3>{name}</h3>" in page
    assert page.count("<svg viewBox") == 4
    assert read_refusal(*BOTH, "--plot", "page.html") == "page.html exists: choose another name or say --overwrite"
    ok(*BOTH, "--plot", "page.html", "--overwrite")
    Path("mine.html").write_text("mine")
    assert read_refusal(*BOTH, "--plot", "mine.html", "--overwrite") == (
        "mine.html exists and is not a report: it is not overwritten"
    )
