"""The model card of an output: metadata for the Hub, how to load it, and what was done."""

from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.job.model_card import front_matter, metadata, sentence_class_of
from ckpt_prune.runner.sections import all_sections, name_report
from ckpt_prune.show.markdown import print_markdown
from ckpt_prune.stages.report import Report


def model_card(report: Report) -> str:
    """Return README.md of an output."""
    made = as_markdown(f"Made by ckpt_prune {report.ckpt_prune}")
    load = "Replace PATH by this folder, or by its id on the Hub."
    if report.container.remote_code:
        load += " `from_pretrained` of every other class refuses it."
    size, *others = all_sections(report)
    return "\n".join(
        [
            front_matter(metadata(report)),
            f"# {as_markdown(name_report(report))}",
            "",
            f"{made} from {as_code(report.source.name)}.",
            "",
            print_markdown([size]),
            "## How to load it",
            "",
            load,
            "",
            "```python",
            *_loading(report),
            "```",
            "",
            print_markdown(others),
            "`ckpt_prune.json` has these figures for every block. `ckpt-prune report PATH` draws them as one page.",
            "",
        ]
    )


def _loading(report: Report) -> list[str]:
    """Return the lines of code that load the output from "PATH"."""
    auto, remote = report.container.auto_class, report.container.remote_code
    trusted = ", trust_remote_code=True" if remote else ""
    lines = [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("PATH"{trusted})']
    if remote:
        lines[0] += "  # without ckpt_prune"
        ours = "import ckpt_prune  # without running the code in the folder"
        lines = [ours, "", 'model = ckpt_prune.load("PATH")', "", *lines]
    loader = sentence_class_of(report)
    if loader is not None:
        what = "scores of pairs of texts" if loader == "CrossEncoder" else "embeddings of texts"
        lines += ["", f"from sentence_transformers import {loader}  # for {what}", ""]
        lines += [f'model = {loader}("PATH"{trusted})']
    return lines
