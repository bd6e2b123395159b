"""The model card: what it says is true of what was done, whichever way."""

from typing import Any

import pytest

from ckpt_prune.job.report import Report
from ckpt_prune.report.card import model_card
from tests.reporting.examples import Json, elsewhere, kept, layer, learned, linear, masked, recovery, report, site

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
        Report.read(
            {"mask": None, "rotation": None, "linears": []}
            | made
            | {"calibration": calibration, "container": container()}
            | changes
        )
    ).split("\n")


def test_units():
    lines = card(report([site(0)]))
    assert lines == [
        *[
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [ckpt-prune, pruned]",
            "---",
            "",
        ],
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
        "Units kept in each block: `mlp` 4 of 8 (columns of the MLP).",
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
    assert "Load it as below: `from_pretrained` of every other class refuses it." in lines
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
        "Load it as below: `from_pretrained` of every other class refuses it.",
    ]
    assert f"model = {REMOTE}" in lines
    assert lines[-2].endswith(f"are in `ckpt_prune.json`{ROTATED}")


FOLDED = {
    "shared": "all blocks share one basis of the residual stream, which is absorbed by the weights and adds no "
    "computation at run time",
    "values": "the values of every head turn, which is absorbed by the weights before and after them and adds no "
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


LACO = "Recovered with LaCo: Layer-wise Compensation for Pruned Large Language Models, ACL 2026 long.1342"
RECORDED = ", with errors of every block before and after recovery"


def test_recovery():
    layers = [layer(0), kept(1, mse_before=1.0, mse_after=1.0, cka_before=0.5, cka_after=0.5)]
    lines = card(report([site(0)], recovery=recovery(), layers=layers))
    assert "# tiny, pruned by recipe corp and recovered" in lines
    after = lines.index("Calibrated on 128 windows of 2048 tokens, target sequential.")
    assert lines[after + 2 : after + 4] == [
        f"{LACO}: the weights that pruning left were trained towards the hidden states of `dense`, block by block "
        "after pruning, on 128 windows of 256 tokens, 13 of them held out, up to 10 epochs at a learning rate of "
        "0.001. 1 of 2 blocks have new weights; zeros stay zero. On held-out samples, mean over blocks, before -> "
        "after: mean squared error of the hidden states 0.75 -> 0.625, their linear CKA 0.625 -> 0.6875.",
        "",
    ]
    assert lines[-2] == f"Kept units and errors of every layer are in `ckpt_prune.json`{RECORDED}."


@pytest.mark.parametrize(("only", "which"), [("mlp", "MLP "), ("attention", "attention "), (None, "")])
def test_recovery_of_a_part(only, which):
    made = recovery(on_the_fly=True, data={"modality": "image", "samples": 64, "held_out": 6, "tokens": 1088})
    made["settings"] |= {"only": only, "layers": "2:5"}
    lines = card(masked([linear(0)], learned(0), recovery=made, layers=[layer(0)]))
    (line,) = (line for line in lines if line.startswith("Recovered"))
    assert line.startswith(
        f"{LACO}: the {which}weights that pruning left of layers `2:5` were trained towards the hidden states of "
        "`dense`, each block right after it was pruned, on 64 images, 6 of them held out, up to 10 epochs at "
        "a learning rate of 0.001. 1 of 1 blocks have"
    )
    assert lines.index(line) == next(i for i, told in enumerate(lines) if told.startswith("Rotation")) + 1
    assert lines[-2].endswith(f"error at its output are in `ckpt_prune.json`{RECORDED}{ROTATED}")


@pytest.mark.parametrize("nothing", [None, float("nan"), float("inf")])
def test_only_figures_that_are_there_are_averaged(nothing):
    layers = [layer(0, mse_after=nothing, cka_before=nothing), layer(1, cka_after=nothing)]
    line = next(line for line in card(elsewhere(layers)) if line.startswith("Recovered"))
    assert line.endswith("before -> after: mean squared error of the hidden states 0.5 -> 0.25.")
    line = next(line for line in card(elsewhere([kept(0, mse_before=nothing, cka_after=nothing)])) if LACO in line)
    assert line.endswith("0 of 1 blocks have new weights; zeros stay zero.")


def test_an_earlier_recovery():
    earlier = {"recovery": recovery(), "layers": [layer(0)]}
    lines = card(elsewhere([layer(0)], recovery=recovery(earlier=earlier)))
    (line,) = (line for line in lines if LACO in line)
    told = " It had been recovered before; that record is in `ckpt_prune.json` as `recovery.earlier`."
    assert told in line
    first = card(elsewhere([layer(0)], recovery=recovery(earlier=None)))
    assert [each.replace(told, "") for each in lines] == first


def test_what_was_pruned_elsewhere():
    lines = card(elsewhere([layer(0)], recipe={"name": "pruned elsewhere"}))
    assert "# tiny, pruned elsewhere and recovered" in lines
    assert "Made by ckpt_prune 0.1.0 from `tiny`." in lines
    assert "Made by ckpt_prune 0.1.0 from `tiny`. By another tool." in card(elsewhere([layer(0)]))
    assert "| parameters | 1.50M | 1.50M | 100.0% |" in lines
    assert not any(line.startswith("Source of the method") for line in lines)
    assert lines[-2] == "Errors of every block before and after recovery are in `ckpt_prune.json`."


def test_no_recovery():
    plain = card(report([site(0)]))
    assert plain == card(report([site(0)], recovery=None, layers=[]))
    assert not any("ecover" in line for line in plain)
