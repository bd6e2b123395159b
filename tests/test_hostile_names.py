"""Names and texts from files in everything that people read: shown, and never obeyed."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.safe_text import CONTROL_CHARACTERS, escape_controls
from ckpt_prune.evaluation.block_comparison import BlockComparison, Comparison, SharesOfError, Similarity
from ckpt_prune.evaluation.comparison_section import show_comparison
from ckpt_prune.hub.figures import MeasuredFigure, figures_table, to_model_index
from ckpt_prune.hub.recipes import _card as recipe_card
from ckpt_prune.job.report import SourceCard
from ckpt_prune.onnx.card import make_card as make_graph_card
from ckpt_prune.onnx.records import GraphEntry, GraphSource, Manifest, Port
from ckpt_prune.runner.publish import model_card
from ckpt_prune.runner.sections import titled_sections
from ckpt_prune.show.html import print_page
from ckpt_prune.show.model_card import front_matter
from ckpt_prune.stages.quantize.records import QuantizationRecord, make_card
from ckpt_prune.stages.report import AnyPlan, Report, read_report_or_plan
from tests.cli.running import read_refusal, run
from tests.evaluation.tiny import tiny_llama
from tests.forked import posix
from tests.show.examples import (
    elsewhere,
    layer,
    linear,
    make_learned_rotation,
    make_mask_report,
    parse,
    plan,
    recovery,
    report,
    site,
)

EVIL = "a<script>x</script>|`b`\n# h\n---\nc: d\r\x1b[31m\x9b\u202e\u2028![i](u)'\"]"
DEPTH = {
    "blocks": 4,
    "kept": [0, 3],
    "choose": "cosine",
    "gaps": [
        {"first": 1, "blocks": 2, "into": "w", "method": "ridge", "error_uncompensated": 1, "error_compensated": 1}
    ],
}
CARD = {"license": "mit", "license_name": "n", "license_link": "l", "language": ["en"], "datasets": ["d"]}
REPORTS = {
    "units": report(
        [site(0)],
        origin={"reference": "org/name", "revision": "r", "sha256": "5"},
        source={"name": "org/tiny", "fingerprint": "f", "card": CARD | {"pipeline_tag": "p"}},
        part="text",
        container={"model_type": "vit", "remote_code": False, "note": "n", "auto_class": "AutoModel", "padded": ["p"]},
        stages=[{"name": "prune", "seconds": 1.0}],
        depth=DEPTH,
        lora={"rank": 1, "modules": 2, "data": "d", "loss_before": 1.0, "loss_after": 1.0, "settings": {"k": "v"}},
    ),
    "mask": make_mask_report(
        [linear(0)],
        make_learned_rotation(0),
        recovery=recovery(settings={"only": "mlp", "layers": "0:1"}),
        layers=[layer(0)],
    ),
    "recovery": elsewhere([layer(0)], recovery=recovery(earlier={"recovery": recovery(), "layers": [layer(0)]})),
    "plan": plan([site(0)], origin={"reference": "org/name", "revision": "5", "sha256": "5"}, depth=DEPTH),
}


def leaves(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, str):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(inner, *path, key)


def with_evil(value: Any, path: Sequence[str | int]) -> Any:
    """A copy with the text at a place replaced."""
    if not path:
        return EVIL
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_evil(copy[path[0]], path[1:])
    return copy


def check_markdown(text: str) -> None:
    """Assert that any markup outside code and escaped signs is this tool's own."""
    assert CONTROL_CHARACTERS.search(text) is None
    front, *parts = text.removeprefix("---\n").split("\n---\n") if text.startswith("---\n") else ("", text)
    assert len(parts) == 1
    assert isinstance(yaml.safe_load(front), dict | None)
    body = re.sub(r"```\w*\n.*?\n```", "", parts[0], flags=re.DOTALL)
    body = re.sub(r"\\.", "", re.sub(r"`[^`\n]+`", "", body))
    for sign in ("<", "`", "]("):
        assert sign not in body, text
    headings = [line for line in body.splitlines() if line.startswith("#")]
    assert len([line for line in headings if not line.startswith("##")]) <= 1, text
    for run_of in re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE):
        assert len({line.count("|") for line in run_of.splitlines()}) == 1, text


def check_html(html: str) -> None:
    assert CONTROL_CHARACTERS.search(html) is None
    assert "script" not in {element.tag for element in parse(html).iter()}


@pytest.mark.parametrize("name", REPORTS)
def test_no_text_of_a_report_or_plan_is_markup(tmp_path: Path, name: str) -> None:
    content = REPORTS[name]
    file = tmp_path / ("plan.json" if name == "plan" else REPORT)
    together = content
    for path in leaves(content):
        for values in (with_evil(content, path), with_evil(together, path)):
            try:
                read = (AnyPlan if name == "plan" else Report).read(values)
            except ValueError:
                continue  # one line, elsewhere
            if isinstance(read, Report):
                check_markdown(model_card(read))
            together = values
    assert json.dumps(together).count(json.dumps(EVIL)) > 5
    file.write_text(json.dumps(together))
    check_html(print_page(*titled_sections(read_report_or_plan(file))))


def quantised_card() -> str:
    card = SourceCard(license_name=EVIL, language=[EVIL])
    versions = dict.fromkeys(("ckpt_prune", "compressed_tensors", "torch", "transformers"), EVIL)
    values = {"auto_class": "AutoModelForCausalLM", "format": "int8", "group_size": None, "before": 2, "after": 1}
    source = {"name": f"{EVIL}/{EVIL}", "fingerprint": "f", "card": card.model_dump()}
    return make_card(QuantizationRecord.read(versions | values | {"source": source, "weights": [{"weight": EVIL}]}))


def of_a_graph() -> str:
    port = Port(name="input_ids", type="int64", shape=["batch_size", 2])
    graph = GraphEntry(
        file="model.onnx", dtype="fp32", opset=20, inputs=[port], outputs=[port], tensors={EVIL: "5"}, quantization=None
    )
    manifest = Manifest(
        versions={"ckpt_prune": "1"},
        source=GraphSource(name=EVIL, fingerprint="f"),
        task="text-generation",
        modality="text",
        cached=False,
        optimize="none",
        files={"tokenizer.json": "5"},
        graphs=[graph],
    )
    return make_graph_card(manifest, {"model_type": EVIL, "architectures": [EVIL]}, folder=Path())


def of_recipes() -> str:
    return recipe_card("org/name", "own.yaml", EVIL)


def with_figures() -> str:
    figures = [MeasuredFigure(escape_controls(EVIL), "perplexity", EVIL, 1.0, 2.0)]
    index = to_model_index(EVIL, EVIL, figures)
    return front_matter({"model-index": index}) + "\n".join(figures_table(figures))


@pytest.mark.parametrize("written", [quantised_card, of_a_graph, of_recipes, with_figures])
def test_no_name_is_markup_on_a_card(written: Callable[[], str]) -> None:
    check_markdown(written())


def test_no_name_is_markup_on_a_page() -> None:
    block = BlockComparison(0, Similarity(*([0.5] * len(fields(Similarity)))), SharesOfError(0.5, 0.25, None))
    comparison = Comparison(Path(EVIL), Path(EVIL), [block], 0.1, True, 1, 2)
    check_html(print_page(EVIL, [show_comparison(comparison)]))


def test_json_is_read_back_and_obeyed_by_nothing() -> None:
    assert CONTROL_CHARACTERS.search(pretty_json({EVIL: [EVIL]}).replace("\n", "")) is None
    assert json.loads(pretty_json({EVIL: [EVIL]})) == {EVIL: [EVIL]}


@posix
def test_no_name_on_a_command_line_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are no Unicode were tracebacks, one of them after all work was done."""
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(EVIL.replace("/", "").encode() + b"\xff")
    tiny_llama().save_pretrained(name)
    recipe = {"version": 1, "name": EVIL, "summary": EVIL, "source": EVIL, "target": "dense", "ratio": 0.5}
    mlp = {"score": "magnitude", "compensation": {"method": "none"}}
    Path(f"{name}.json").write_text(json.dumps(recipe | {"spaces": {"mlp": mlp}}))
    pruned, page_of, planned = f"{name}-pruned", f"{name}.html", f"{name}-plan.json"
    for command, code in (
        (("inspect", name), 0),
        (("inspect", name, "--json"), 0),
        (("recipe", "show", f"{name}.json"), 0),
        (("recipe", "validate", f"{name}.json"), 0),
        (("plan", name, "--recipe", f"{name}.json", "-o", planned), 0),
        (("prune", name, "--recipe", f"{name}.json", "-o", pruned), 0),
        (("verify", pruned, "--against", name), 1),  # transformers maps no file whose name is not UTF-8
        (("report", pruned, "-o", page_of), 0),
        (("report", planned, "-o", f"{name}-plan.html"), 0),
        (("statistics", "show", name), 2),
        (("verify", f"{name}-absent"), 2),
        (("convert", name, "-o", "out"), 2),
        (("calibrate", name, "--text", name, "-o", "out"), 2),
    ):
        done = run(*command)
        assert done.exit_code == code, done.output
        assert CONTROL_CHARACTERS.search(done.output) is None, command
        assert code != 2 or len(done.stderr.splitlines()) == 1, command
    check_markdown((Path(pruned) / "README.md").read_text())
    for file in Path().glob("*.html"):
        check_html(file.read_text())
    for file in [*Path(pruned).glob("*.json"), Path(planned)]:
        assert CONTROL_CHARACTERS.search(file.read_text()) is None


def test_a_tensor_and_a_side_file_with_such_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("dense")
    (Path("dense") / "licence\x1b[2J").write_text("mine")
    assert read_refusal("prune", "dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out") == (
        "dense/licence\\x1b[2J has control characters in its name, or is not Unicode; rename it"
    )
    save_file({"a\nverify: ok": torch.zeros(2)}, Path("dense") / "model.safetensors")
    assert read_refusal("inspect", "dense") == (
        "dense/model.safetensors is not a valid safetensors file (tensor 'a\\nverify: ok' has control characters in "
        "its name); download it again"
    )
