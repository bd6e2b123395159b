"""`recover --method lora --data`: rows of instruction, input and output, as LLM-Pruner's tuning reads them."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ckpt_prune.measure.samples.instructions import encode_answer, read_answers
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import LoraSettings
from ckpt_prune.stages.recovery.lora import LoraExamples, LoraObjective
from ckpt_prune.stages.recovery.training import share_of_rate
from tests.cli.running import ok, read_json, set_config
from tests.cli.test_recover import find_changed, linears, report_of

ROWS = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Say the letters.", "output": "a b c"},
    {"instruction": "Say nothing.", "input": "", "output": ""},
    {"instruction": "Name a colour.", "output": "red " * 200},
    *({"instruction": f"Count to {n}.", "input": "from one", "output": " ".join(map(str, range(n)))} for n in range(9)),
]
"""Of an empty answer the end-of-sequence token is learned, if there is one."""
WIDE = ("--window", "400")


@pytest.fixture
def rows(place: Path) -> Path:
    set_config("dense", max_position_embeddings=512)
    path = place / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def prompt_by_hand(row: dict[str, str]) -> str:
    """As Alpaca's repository prints it."""
    if row.get("input"):
        return (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n### Instruction:\n"
            f"{row['instruction']}\n\n### Input:\n{row['input']}\n\n### Response:\n"
        )
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        f"\n\n### Instruction:\n{row['instruction']}\n\n### Response:\n"
    )


def test_answers_are_the_labels_and_nothing_else_is(rows):
    model = Model.open("dense")
    tokenizer = load_tokenizer(Path("dense"))
    read = read_answers(model, rows, cutoff=400, most=None, seed=0)
    batch = read.batch(slice(None))
    expected = []
    for row in ROWS:
        prompt = tokenizer(prompt_by_hand(row))["input_ids"]
        whole = tokenizer(prompt_by_hand(row) + row["output"])["input_ids"]
        if tokenizer.eos_token_id is not None and len(whole) < 400:
            whole.append(tokenizer.eos_token_id)
        if len(whole[:400]) > len(prompt):
            expected.append((whole[:400], len(prompt)))
    assert len(read) == len(expected) >= len(ROWS) - 1
    for at, (ids, prompt_tokens) in enumerate(expected):
        assert batch["input_ids"][at, : len(ids)].tolist() == ids
        assert batch["attention_mask"][at].tolist() == [1] * len(ids) + [0] * (read.tokens - len(ids))
        labels = [-100] * prompt_tokens + ids[prompt_tokens:]
        assert batch["labels"][at].tolist() == labels + [-100] * (read.tokens - len(ids))
    fewer = read_answers(model, rows, cutoff=400, most=5, seed=3)
    assert len(fewer) <= 5
    assert fewer.fingerprint != read_answers(model, rows, cutoff=400, most=5, seed=4).fingerprint
    prompt = prompt_by_hand(ROWS[0])
    assert encode_answer(tokenizer, prompt, "3", len(tokenizer(prompt)["input_ids"])) is None


def test_loss_and_gradients_are_those_of_peft_on_the_same_batch(rows):
    """peft's own model with labels: the mean over the answers' tokens of a batch, in one go and in parts."""
    peft = pytest.importorskip("peft")
    read = read_answers(Model.open("dense"), rows, cutoff=400, most=None, seed=0)
    batch, picked = read.batch(slice(None)), torch.tensor([0, 1, 3, 5])

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained("dense", dtype=torch.float32)

    names = [name for name, module in load().named_modules() if "layers" in name and hasattr(module, "weight")]
    names = [name for name in names if "norm" not in name]
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        theirs = peft.get_peft_model(load(), peft.LoraConfig(r=8, lora_alpha=16, target_modules=names))
    theirs.train()
    loss = theirs(**{name: values[picked] for name, values in batch.items()}).loss
    loss.backward()
    for part in (4, 3):
        torch.manual_seed(0)
        modules = {name: (f"{name}.weight", torch.float32) for name in names}
        with warnings.catch_warnings(action="ignore"):
            ours = LoraObjective(load(), modules, LoraExamples(batch), LoraSettings.model_validate({}), part)
        ours.add_gradients(picked)
        gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        scale = min(1.0, 1.0 / float(norm))
        for (name, expected), parameter in zip(gradients.items(), ours.parameters, strict=True):
            # Sums of float32 in another order: a few hundred terms of 2**-24 each, against the largest.
            tolerance = 2e-5 * float(max(g.abs().max() for g in gradients.values()))
            torch.testing.assert_close(parameter.grad, scale * expected, rtol=1e-4, atol=tolerance, msg=name)
        assert ours.loss(picked) == pytest.approx(loss.item(), rel=1e-5)


def test_the_published_settings_are_the_defaults_of_rows(rows):
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    args = ("recover", "masked", "--method", "lora", "--data", "rows.jsonl", *WIDE)
    ok(*args, "--lr", "0.5", "--held-out", "0.3", "-o", "out")
    record = report_of("out")["adapters"]
    chosen = record["settings"]
    assert {key: chosen[key] for key in ("epochs", "batch", "schedule", "dropout", "warm_up", "weight_decay")} == {
        **{"epochs": 2, "batch": 64, "schedule": "linear"},
        **{"dropout": 0.05, "warm_up": 100, "weight_decay": 0.0},
    }
    assert (record["rank"], record["alpha"], record["lr"]) == (8, 16, 0.5)
    assert record["steps"] == 2  # the first of them at a rate of 0
    assert record["loss_after"] < record["loss_before"]
    assert find_changed("out", "masked") == linears(0, 1)
    ok(*args, "--epochs", "1", "--batch", "4", "--held-out", "0.3", "--samples", "10", "-o", "less")
    less = read_json("less/ckpt_prune.json")["adapters"]
    assert less["settings"]["epochs"] == 1
    assert less["lr"] == 1e-4


def test_a_rate_that_falls_in_a_line_is_that_of_transformers():
    from transformers import get_linear_schedule_with_warmup

    for climb, steps in ((3, 10), (100, 20)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        theirs = get_linear_schedule_with_warmup(optimizer, climb, steps)
        for step in range(steps):
            assert share_of_rate(step, steps, "linear", climb) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
            optimizer.step()
            theirs.step()
