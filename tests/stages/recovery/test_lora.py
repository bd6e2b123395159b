"""LoRA's training against a plain loop in float64, where orders of sums do not matter."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ckpt_prune.options.training import LoraSettings, RecoverySettings
from ckpt_prune.stages.recovery.lora import LoraExamples, lora_rate, train_adapters
from tests.oracles import lora as oracle

SAMPLES, INPUTS, WIDTH, CLASSES, RANK, ALPHA, SEED = 24, 6, 8, 5, 2, 3.0, 4
HELD_OUT = [4, 12, 20]
"""Three of 24, in the middle of each third."""
# A sum of some tens of terms in another order moves a gradient by 1e-15 of the largest. Adam divides each by its size:
# of those a millionth as large as the largest that makes 1e-9 of a step.
TOLERANCE = 1e-9


class Classifier(nn.Module):
    """Two linear modules, some of whose weights are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(INPUTS, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES, bias=False)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=2.0)
            linear.weight.data[linear.weight.abs() < 0.5] = 0
        self.double()

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.down(torch.tanh(self.up(pixel_values))))


@dataclass(frozen=True)
class DoubleExamples(LoraExamples):
    """Losses in float64, not in float32 as of models."""

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        assert self.classes is not None
        return cross_entropy(model(self.inputs["pixel_values"][rows]).logits, self.classes[rows])


@pytest.mark.parametrize(
    "changes", [{}, {"schedule": "constant", "lr": 0.3}, {"held_out": 0.0, "accumulate": 1}], ids=str
)
def test_training_is_that_of_a_plain_loop(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Classifier()
    pixels = torch.randn(SAMPLES, INPUTS, dtype=torch.float64)
    classes = pixels[:, :CLASSES].argmax(dim=1)
    examples = DoubleExamples({"pixel_values": pixels}, classes)
    dense = {"up": model.up.weight.detach().clone(), "down": model.down.weight.detach().clone()}
    downs: dict[str, Tensor] = {}
    make = peft.get_peft_model

    def record(*args: Any) -> Any:
        adapted = make(*args)
        downs.update({name: getattr(model, name).lora_A["default"].weight.detach().clone() for name in dense})
        return adapted

    monkeypatch.setattr(peft, "get_peft_model", record)
    # 21 samples make batches of 5, 5, 5, 5 and 1, and those of 5 parts of 3 and 2.
    given = {"epochs": 6, "batch": 5, "accumulate": 2, "lr": 0.2, "held_out": 0.125, "patience": 9, **changes}
    settings = RecoverySettings(method="lora", **given)
    losses: list[float] = []
    trained = train_adapters(
        model,
        {name: (name, torch.float64) for name in dense},
        examples,
        settings,
        LoraSettings(rank=RANK, alpha=ALPHA),
        rate=lora_rate(settings, WIDTH),
        seed=SEED,
        progress=lambda _, loss: losses.append(loss),
    )

    def loss(weights: dict[str, Tensor], rows: Any) -> Tensor:
        logits = torch.tanh(pixels[rows] @ weights["up"].T) @ weights["down"].T
        return -logits.log_softmax(-1)[range(len(rows)), classes[rows]].mean()

    chosen = bool(given["held_out"])
    rows = [row for row in range(SAMPLES) if not chosen or row not in HELD_OUT]
    shuffle = torch.Generator().manual_seed(SEED)
    orders = [[rows[place] for place in torch.randperm(len(rows), generator=shuffle)] for _ in range(given["epochs"])]
    batches = [[order[start : start + 5] for start in range(0, len(order), 5)] for order in orders]
    measured = HELD_OUT if chosen else [6, 18]
    path = oracle.train(
        dense,
        downs,
        ALPHA / RANK,
        loss,
        batches,
        measured,
        rate=given["lr"],
        cosine=given.get("schedule") != "constant",
    )
    assert min(path.norms) < 1 < max(path.norms)
    assert trained.steps == len(path.norms)
    assert losses == pytest.approx(path.losses, rel=TOLERANCE)
    assert trained.loss_before == pytest.approx(float(loss(dense, measured)), rel=TOLERANCE)
    best = path.losses.index(min(path.losses)) if chosen else -1
    assert trained.loss_after == pytest.approx(path.losses[best], rel=TOLERANCE)
    assert path.losses[best] < trained.loss_before
    assert trained.kept is not None
    for name, weight in trained.kept.weights.items():
        assert torch.equal(weight == 0, dense[name] == 0)
        torch.testing.assert_close(weight, path.weights[best][name], rtol=0, atol=TOLERANCE * float(weight.abs().max()))


def test_the_rate_is_larger_for_smaller_models_within_limits() -> None:
    usual = RecoverySettings(method="lora")
    assert [lora_rate(usual, hidden) for hidden in (8192, 4096, 1024, 64)] == [5e-5, 1e-4, 4e-4, 1e-3]
    assert lora_rate(RecoverySettings(method="lora", lr=0.5), 64) == 0.5
