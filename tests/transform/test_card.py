"""The model card: what it says is true of what was done, whichever way."""

from typing import Any

import pytest

from ckpt_prune.transform.card import model_card
from tests.reporting.examples import Json, learned, linear, masked, report, site

DENSE = (
    "The tensors keep their dense shapes, zeros included, so size and speed are unchanged by the mask unless a runtime "
    "makes use of the zeros."
)
PACKED = (
    "For 2:4 `torch.sparse.to_sparse_semi_structured` does, on NVIDIA GPUs of compute capability 8.0 or later; vLLM "
    "removed its support of 2:4."
)
KEPT = "Kept units and errors of every layer are in `ckpt_prune.json`."
ROTATED = (
    ", with entropies before and after rotation; the rotations themselves, which no loader needs, are in "
    "`rotations.st`."
)
STOCK = 'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("PATH")'
REMOTE = 'AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)'


def container(*, remote: bool = False, note: str | None = None) -> Json:
    return {"model_type": "llama", "remote_code": remote, "auto_class": "AutoModelForCausalLM", "note": note}


def card(made: Json, **changes: Any) -> list[str]:
    """Its lines."""
    calibration = {"modality": "text", "samples": 128, "window": 2048, "target": "sequential"}
    return model_card(
        {"mask": None, "rotation": None, "linears": []}
        | made
        | {"calibration": calibration, "container": container()}
        | changes
    ).split("\n")


def test_units():
    lines = card(report([site(0)]))
    assert lines == [
        *["---", "library_name: transformers", "tags: [ckpt-prune, pruned]", "---", ""],
        "# tiny, pruned by recipe corp",
        "",
        "Made by ckpt_prune 0.1.0 from `tiny`. Affine. That is the shipped recipe of this name; it was changed here, "
        "and `ckpt_prune.json` has it as it was used.",
        "Source of the method: CORP, eq. 7.",
        "",
        "| | before | after | share |",
        "|---|---|---|---|",
        "| parameters | 2.00M | 1.50M | 75.0% |",
        "| bytes | 8.00 MiB | 6.00 MiB | 75.0% |",
        "| FLOPs of a sample of 1024 tokens | 4.00B | 3.00B | 75.0% |",
        "",
        "Calibrated on 128 windows of 2048 tokens, target sequential.",
        "",
        "```python",
        *STOCK.split("\n"),
        "```",
        "",
        KEPT,
        "",
    ]


def test_units_in_remote_code():
    lines = card(report([site(0)]), container=container(remote=True, note="no slot"))
    assert "Container: no slot." in lines
    assert (
        "Load it as below; plain `from_pretrained` either refuses it or, where only biases have no slot, drops them "
        "with a mere warning."
    ) in lines
    assert f"model = {REMOTE}" in lines


def test_a_mask():
    lines = card(masked([linear(b, zeros=24) for b in range(3)]))
    after = lines.index("Calibrated on 128 windows of 2048 tokens, target sequential.")
    assert lines[after + 1 :] == [
        f"Mask by sparsegpt, pattern 2:4: 75.00% zeros in 3 linear weights of 96 parameters. {DENSE} {PACKED}",
        *["", "```python", *STOCK.split("\n"), "```", ""],
        "How much of every linear weight was zeroed and the error at its output are in `ckpt_prune.json`.",
        "",
    ]


@pytest.mark.parametrize("pattern", ["unstructured", "4:8", "1:4"])
def test_only_two_of_four_has_a_runtime(pattern):
    lines = card(masked([linear(0)], mask={"method": "wanda", "pattern": pattern, "ratio": 0.5}))
    assert f"Mask by wanda, pattern {pattern}: 50.00% zeros in 1 linear weights of 32 parameters. {DENSE}" in lines


def test_a_mask_without_errors():
    lines = card(masked([linear(0, error=None), linear(1, error=None)]))
    assert lines[-2] == "How much of every linear weight was zeroed is in `ckpt_prune.json`."
    assert card(masked([linear(0, error=None), linear(1, error=0.0)]))[-2].startswith(
        "How much of every linear weight was zeroed and the error at its output are in"
    )


def test_a_mask_of_nothing():
    """As for a model that is rotated only."""
    lines = card(masked([linear(0, zeros=0)]))
    assert "Mask by sparsegpt, pattern 2:4: 0.00% zeros in 1 linear weights of 32 parameters." in lines


def test_a_rotation_per_layer():
    note = "the residual stream turns between blocks"
    lines = card(masked([linear(0)], learned(0)), container=container(remote=True, note=note))
    first = next(i for i, line in enumerate(lines) if line.startswith("Rotation"))
    assert lines[first : first + 3] == [
        "Rotation per-layer: every block has its own basis of the residual stream, so a d x d matrix per block (d is "
        "the width of the stream) turns the stream at run time, which takes remote code.",
        f"Container: {note}.",
        "Load it as below: plain `from_pretrained` refuses it, by the shape of the norms' gains, of which one number "
        "is left.",
    ]
    assert not any("only biases" in line for line in lines)
    assert f"model = {REMOTE}" in lines
    assert lines[-2].endswith(f"are in `ckpt_prune.json`{ROTATED}")


FOLDED = {
    "shared": "all blocks share one basis of the residual stream, which is folded away into the weights and adds no "
    "computation at run time",
    "values": "the values of every head turn, which is folded away into the weights before and after them and adds no "
    "computation at run time",
}


@pytest.mark.parametrize(("kind", "what"), FOLDED.items())
def test_rotations_that_are_folded_away(kind, what):
    lines = card(masked([linear(0, error=None)], learned(None), kind=kind))
    assert f"Rotation {kind}: {what}." in lines
    assert not any("d x d" in line or "Load it as below" in line for line in lines)
    assert lines[-2] == f"How much of every linear weight was zeroed is in `ckpt_prune.json`{ROTATED}"
    remote = card(masked([linear(0)], learned(None), kind=kind), container=container(remote=True))
    assert not any("d x d" in line or "these matrices" in line for line in remote)


def test_a_single_block_needs_no_matrix():
    """Its rotation goes into embedding and head."""
    lines = card(masked([linear(0)], learned(0), turns=False))
    assert f"Rotation per-layer: {FOLDED['shared']}." in lines
