"""The model card of an output."""

from typing import Any

from ckpt_prune.checkpoint.units import human_bytes, human_count


def model_card(report: dict[str, Any]) -> str:
    """README.md of an output, from its report: what it is, how it was made, how to load it."""
    recipe, before, after = report["recipe"], report["before"], report["after"]
    calibration, container = report["calibration"], report["container"]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [ckpt-prune, pruned]",
        "---",
        "",
        f"# {report['source']['name']}, pruned by recipe {recipe['name']}",
        "",
        f"Made by ckpt_prune {report['ckpt_prune']} from `{report['source']['name']}`. {recipe['summary']}",
        f"Source of the method: {recipe['source']}." if recipe["source"] else "",
        "",
        "| | before | after | share kept |",
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
    if container["note"]:
        lines.append(f"Container: {container['note']}.")
    if container["remote_code"]:
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
    lines += ["", "```python", loader, "```", "", "Kept units and errors of every layer are in `ckpt_prune.json`.", ""]
    return "\n".join(lines)
