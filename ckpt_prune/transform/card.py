"""The model card of an output."""

import math
from collections.abc import Sequence
from typing import Any

from ckpt_prune.checkpoint.units import human_bytes, human_count
from ckpt_prune.filenames import ELSEWHERE, ROTATIONS
from ckpt_prune.planning.recipe_file import load_recipe, shipped_recipes

_PACKED = (
    "For 2:4 `torch.sparse.to_sparse_semi_structured` does, on NVIDIA GPUs of compute capability 8.0 or later; vLLM "
    "removed its support of 2:4."
)

_LACO = "LaCo: Layer-wise Compensation for Pruned Large Language Models, ACL 2026 long.1342"


_CHANGED = " That is the shipped recipe of this name; it was changed here, and `ckpt_prune.json` has it as it was used."


def model_card(report: dict[str, Any]) -> str:
    """README.md of an output, from its report: what it is, how it was made, how to load it.

    Args:
        report: as in `ckpt_prune.json`; `recovery` and `layers` may be absent.
    """
    recipe, before, after = report["recipe"], report["before"], report["after"]
    calibration, container = report["calibration"], report["container"]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [ckpt-prune, pruned]",
        "---",
        "",
        f"# {report['source']['name']}, {_how(report)}",
        "",
        f"Made by ckpt_prune {report['ckpt_prune']} from `{report['source']['name']}`. {recipe.get('summary', '')}"
        f"{_CHANGED if _is_changed(report) else ''}".rstrip(),
        f"Source of the method: {recipe['source']}." if recipe.get("source") else "",
        "",
        "| | before | after | share |",
        "|---|---|---|---|",
    ]
    for key, show in (("parameters", human_count), ("bytes", human_bytes), ("flops", human_count)):
        name = f"FLOPs of a sample of {before['tokens']} tokens" if key == "flops" else key
        lines.append(f"| {name} | {show(before[key])} | {show(after[key])} | {after[key] / before[key]:.1%} |")
    lines.append("")
    if "window" in calibration:
        what = "images" if calibration["modality"] == "image" else "windows"
        lines.append(
            f"Calibrated on {calibration['samples']} {what} of {calibration['window']} tokens, "
            f"target {calibration['target']}."
        )
    lines += [*_mask(report), *_rotation(report), *_recovery(report)]
    if container["note"]:
        lines.append(f"Container: {container['note']}.")
    if _turns(report):
        lines.append(
            "Load it as below: plain `from_pretrained` refuses it, by the shape of the norms' gains, of which one "
            "number is left."
        )
    elif container["remote_code"]:
        lines.append(
            "Load it as below; plain `from_pretrained` either refuses it or, where only biases have no slot, drops "
            "them with a mere warning."
        )
    auto = container["auto_class"]
    loader = (
        'import ckpt_prune  # without running the code in the folder\n\nmodel = ckpt_prune.load("PATH")\n\n'
        f"from transformers import {auto}  # without ckpt_prune\n\n"
        f'model = {auto}.from_pretrained("PATH", trust_remote_code=True)'
        if container["remote_code"]
        else f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("PATH")'
    )
    lines += ["", "```python", loader, "```", "", _record(report), ""]
    return "\n".join(lines)


def _how(report: dict[str, Any]) -> str:
    """What was done, in the words of a heading."""
    name = report["recipe"]["name"]
    pruned = name if name == ELSEWHERE else f"pruned by recipe {name}"
    return f"{pruned} and recovered" if report.get("recovery") else pruned


def _mask(report: dict[str, Any]) -> list[str]:
    """What was zeroed, and what that is good for."""
    mask, linears = report["mask"], report["linears"]
    if mask is None:
        return []
    zeros, size = sum(e["zeros"] for e in linears), sum(e["rows"] * e["columns"] for e in linears)
    sentences = [
        f"Mask by {mask['method']}, pattern {mask['pattern']}: {zeros / size:.2%} zeros in {len(linears)} linear "
        f"weights of {human_count(size)} parameters."
    ]
    if zeros:
        sentences.append(
            "The tensors keep their dense shapes, zeros included, so size and speed are unchanged by the mask unless "
            "a runtime makes use of the zeros."
        )
    if zeros and mask["pattern"] == "2:4":
        sentences.append(_PACKED)
    return [" ".join(sentences)]


def _is_changed(report: dict[str, Any]) -> bool:
    """Whether the recipe bears the name of a shipped one and is another."""
    name = report["recipe"]["name"]
    return name in shipped_recipes() and load_recipe(name).digest != report["recipe_digest"]


def _turns(report: dict[str, Any]) -> bool:
    """Whether rotations stay in the model, as matrices between blocks."""
    rotation = report["rotation"]
    return rotation is not None and rotation["turns"]


def _rotation(report: dict[str, Any]) -> list[str]:
    """What was turned, and what of it remains at run time."""
    rotation = report["rotation"]
    if rotation is None:
        return []
    if rotation["kind"] == "values":
        what = (
            "the values of every head turn, which is folded away into the weights before and after them and adds no "
            "computation at run time"
        )
    elif _turns(report):
        what = (
            "every block has its own basis of the residual stream, so a d x d matrix per block (d is the width of the "
            "stream) turns the stream at run time, which takes remote code"
        )
    else:
        what = (
            "all blocks share one basis of the residual stream, which is folded away into the weights and adds no "
            "computation at run time"
        )
    return [f"Rotation {rotation['kind']}: {what}."]


def _recovery(report: dict[str, Any]) -> list[str]:
    """What was trained towards which model, and how much nearer that brought the hidden states."""
    recovery, layers = report.get("recovery"), report.get("layers") or []
    if not recovery:
        return []
    settings, data = recovery["settings"], recovery["data"]
    which = "" if settings["only"] is None else f"{'MLP' if settings['only'] == 'mlp' else settings['only']} "
    where = "" if settings["layers"] is None else f" of layers `{settings['layers']}`"
    when = "each block right after it was pruned" if recovery["on_the_fly"] else "block by block after pruning"
    samples = "images" if data["modality"] == "image" else f"windows of {data['window']} tokens"
    changed = sum(layer["recovered"] for layer in layers)
    sentences = [
        f"Recovered with {_LACO}: the {which}weights that pruning left{where} were trained towards the hidden states "
        f"of `{recovery['dense']['name']}`, {when}, on {data['samples']} {samples}, {data['held_out']} of them held "
        f"out, up to {settings['epochs']} epochs at a learning rate of {settings['lr']:.3g}. {changed} of "
        f"{len(layers)} blocks have new weights; zeros stay zero."
    ]
    changes = [
        f"{name} {means[0]:.4g} -> {means[1]:.4g}"
        for key, name in (("mse", "mean squared error of the hidden states"), ("cka", "their linear CKA"))
        if (means := _means(layers, key)) is not None
    ]
    if recovery.get("earlier"):
        sentences.append("It had been recovered before; that record is in `ckpt_prune.json` as `recovery.earlier`.")
    if changes:
        sentences.append(f"On held-out samples, mean over blocks, before -> after: {', '.join(changes)}.")
    return [" ".join(sentences)]


def _means(layers: Sequence[dict[str, Any]], key: str) -> tuple[float, float] | None:
    """Mean before and after recovery over the blocks that have both as finite numbers."""
    pairs = [(layer[f"{key}_before"], layer[f"{key}_after"]) for layer in layers]
    known = [pair for pair in pairs if all(value is not None and math.isfinite(value) for value in pair)]
    if not known:
        return None
    before, after = (math.fsum(values) / len(known) for values in zip(*known, strict=True))
    return before, after


def _record(report: dict[str, Any]) -> str:
    """What else there is to read of the output."""
    recovered = bool(report.get("recovery"))
    if report["mask"] is not None:
        measured = any(linear["error"] is not None for linear in report["linears"])
        what = "How much of every linear weight was zeroed"
        found = f"{what} and the error at its output are" if measured else f"{what} is"
    elif recovered and not report["sites"]:
        return "Errors of every block before and after recovery are in `ckpt_prune.json`."
    else:
        found = "Kept units and errors of every layer are"
    found += " in `ckpt_prune.json`"
    if recovered:
        found += ", with errors of every block before and after recovery"
    if report["rotation"] is not None:
        found += ", with entropies before and after rotation; the rotations themselves, which no loader needs, are in "
        found += f"`{ROTATIONS}`"
    return f"{found}."
