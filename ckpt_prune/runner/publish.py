"""Write everything of an output but its tensors: config, record, model card, remote code, side files."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.folder_kinds import OUTPUT_KIND, WEIGHT_NAMES, WantedNames
from ckpt_prune.checkpoint.json_files import pretty_json, read_json_object
from ckpt_prune.checkpoint.side_files import carried_files, side_files_of, top_names
from ckpt_prune.checkpoint.staging import Staging, write_atomically
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD, QUANTISED_RECORD, RECIPE, REPORT
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.job.form import Form
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.report import Loss
from ckpt_prune.job.run import Announce, Run
from ckpt_prune.model.composites import merge_part_config
from ckpt_prune.model.containers.remote import MLX_KEY, MLX_MODULE, REMOTE_MODULE, read_code
from ckpt_prune.model.containers.rope_keys import OLDER_KEYS, PARAMETERS, state_rope
from ckpt_prune.model.runtimes import MLX_FAMILIES, places
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.shipped import text_of_recipe
from ckpt_prune.runner.follow import follow
from ckpt_prune.runner.report import report_of
from ckpt_prune.runner.sections import all_sections, name_report
from ckpt_prune.show.markdown import print_markdown
from ckpt_prune.show.model_card import front_matter, lines_of_search, metadata, sentence_class_of
from ckpt_prune.stages.folders import find_functions, stages_of
from ckpt_prune.stages.quantize.records import find_record, make_card
from ckpt_prune.stages.report import Report, find_report

_CARD = "README.md"
_PRUNED = Form(find_report, report_of)


def form_of(recipe: Recipe) -> Form:
    """Return the form of a job's output: that of a stage, or a report of what all stages did."""
    return next((form for stage in stages_of(recipe) if (form := stage.form()) is not None), _PRUNED)


def publish(prepared: Prepared, records: Mapping[str, Sequence[Any]], run: Run) -> Any:
    """Write all that is no tensor and put the output in its place.

    Args:
        prepared: the job at its end, with every tensor written.
        records: key of a stage → records of its step on all blocks.

    Returns:
        The record, with digests of all files but itself and the card.
    """
    source, output, writer, form = prepared.job.model.checkpoint, prepared.output, run.writer, form_of(prepared.recipe)
    assert writer is not None
    assert form.make is not None
    record = form.make(prepared, records, run)
    with run.timer.time("publishing"):
        config, remote = output.container.config, output.container.remote_class is not None
        if source.within is not None:
            config = merge_part_config(source, config)
        config = state_rope(config)
        modules = []
        if remote:
            from ckpt_prune.modeling_pruned import REFUSAL, WEIGHTS_KEY

            config, modules = config | {WEIGHTS_KEY: REFUSAL}, [REMOTE_MODULE]
            if source.within is None and config["model_type"] in MLX_FAMILIES:
                config, modules = config | {MLX_KEY: f"{MLX_MODULE}.py"}, [REMOTE_MODULE, MLX_MODULE]
        writer.write_json(CONFIG, config)
        for name, code in read_code(modules).items():
            writer.write_text(name, code)
        for name in output.copied:
            writer.copy(source.path / name)
        for name, path in carried_files(source).items():
            if name not in source.rewritten:
                writer.copy(path, name)
            elif (content := source.rewritten[name]) is not None:
                writer.write_bytes(name, content)
        recipe = record.read_recipe() if form.kind is OUTPUT_KIND else None
        if recipe is not None:
            writer.write_text(RECIPE, text_of_recipe(recipe))
        writer.write_index()
        names = [*output.layout, *output.aside, *output.copied, CONFIG, *sorted(writer.side_names)]
        digests = sha256_files(writer.folder, dict.fromkeys(names))
        carried_files(source)  # raises if one changed while it was copied
        if (left_out := side_files_of(source).line) is not None:
            run.announce(left_out)
    return put_in_place(writer, record, form, digests, run)


def put_in_place(writer: CheckpointWriter, record: Any, form: Form, digests: Mapping[str, str], run: Run) -> Any:
    """Write record and card, and put an output with these files in its place. Return the record with their digests."""
    for source in run.sources:
        source.check_unchanged()
    is_output = form.kind is OUTPUT_KIND
    written_last = {form.kind.record, _CARD} if is_output or form.card is not None else {form.kind.record}
    ends = {
        "stages": run.timer.records,
        "files": digests,
        "side_files": sorted(writer.side_names - {CONFIG} | written_last),
        "job": writer.job,
    }
    record = record.model_copy(update={key: end for key, end in ends.items() if key in type(record).model_fields})
    writer.write_json(form.kind.record, record.data())
    if is_output:
        writer.write_text(_CARD, model_card(record, read_json_object(writer.folder / CONFIG), folder=writer.folder))
    elif form.card is not None:
        writer.write_text(_CARD, form.card(record))
    follow(run)
    _announce_stale(writer.out, writer.finish(), run.announce)
    return record


def publish_complete(staging: Staging, form: Form, run: Run) -> Any:
    """Put in its place what an interrupted run has written whole, but perhaps for exports. Return its record."""
    if not staging.journal.complete:
        follow(run)
    _announce_stale(staging.out, staging.publish(), run.announce)
    return form.read(staging.out)


def _announce_stale(out: Path, kept: Iterable[str], announce: Announce) -> None:
    for name in kept:
        if (out / name / GRAPH_RECORD).is_file() or name.endswith(".gguf"):
            announce(f"{out / name} was exported from the output that is replaced: export it again")


def replace_record(out: Path, report: Report) -> None:
    """Replace report and card of an output that is in its place: no digest is of them.

    The report is last, so that a run which ends between the two has it still to do.
    """
    write_atomically(out / _CARD, model_card(report, read_json_object(out / CONFIG), lines_of_search(out), out))
    write_atomically(out / REPORT, pretty_json(report.data()))


def note_loss(out: Path, loss: Loss) -> Loss | None:
    """Note a measured loss in the record and the card of a finished output, and return the one that stood there.

    An output of `quantize` may have a loss for each model that it was compared with. That of a file in the output stays
    where the weights beside it are measured.
    """
    report, rounded = find_report(out), find_record(out)
    if report is not None:
        if report.loss is None or report.loss.file is None or loss.file is not None:
            replace_record(out, report.model_copy(update={"loss": loss}))
        return report.loss
    if rounded is not None:
        earlier = next((each for each in rounded.losses if each.against == loss.against), None)
        losses = [*(each for each in rounded.losses if each is not earlier), loss]
        rounded = rounded.model_copy(update={"losses": losses})
        write_atomically(out / _CARD, make_card(rounded, lines_of_search(out)))
        write_atomically(out / QUANTISED_RECORD, pretty_json(rounded.data()))
        return earlier
    return None


def wanted_names(source: Checkpoint, recipe: Recipe) -> WantedNames:
    """Return the names that an output will have at its top, as far as they are known."""
    names = {
        *source.files,
        CONFIG,
        form_of(recipe).kind.record,
        _CARD,
        RECIPE,
        f"{REMOTE_MODULE}.py",
        f"{MLX_MODULE}.py",
    }
    names |= {name for keys in recipe.stages for name in keys.writes}
    return top_names(side_files_of(source).files) | WEIGHT_NAMES | dict.fromkeys(names)


def model_card(
    report: Report,
    config: Mapping[str, Any] | None = None,
    found: Sequence[str] = (),
    folder: Path | None = None,
) -> str:
    """Return README.md of an output. With its config.json the card also says which runtimes take it.

    Args:
        found: sentences of what else is known, as by a search.
        folder: with the tokenizer, which llama.cpp may not have.
    """
    maker = as_markdown(f"Made by ckpt_prune {report.ckpt_prune}")
    load = "Replace PATH by this folder, or by its id on the Hub."
    if report.container.remote_code:
        load += " `from_pretrained` of every other class refuses it. Its code needs transformers 5.19 or later."
    elif config is not None and PARAMETERS in config and config.keys() & OLDER_KEYS:
        load += (
            " transformers 4.57 reads the same rotary positions: config.json also states them under the keys that it "
            "knows."
        )
    size, *others = all_sections(report)
    return "\n".join(
        [
            front_matter(metadata(report)),
            f"# {as_markdown(name_report(report))}",
            "",
            f"{maker} from {as_code(report.source.name)}.",
            *found,
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
            *_running(report, config, folder),
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


def _running(report: Report, config: Mapping[str, Any] | None, folder: Path | None) -> list[str]:
    """Return a table of the runtimes that take an output, with the command for each; empty for a part of a model."""
    if report.part is not None or config is None:
        return []
    generates = report.container.auto_class == "AutoModelForCausalLM"
    exported = [kind for types in find_functions("exported_types", "show") for kind in types(report, config)]
    commands = places(
        config,
        masked=any(count(report) for count in find_functions("count_zeros", "show")),
        generates=generates,
        auto_class=report.container.auto_class,
        exported=tuple(exported),
    )
    if "llama.cpp" in commands and not (folder is None or _has_its_tokenizer(folder, config, generates)):
        del commands["llama.cpp"]
    shown = {name: [as_code(step.replace("OUT", "PATH")) for step in steps] for name, steps in commands.items()}
    rows = [f"| {name} | {', then '.join(steps)} |" for name, steps in shown.items()]
    return ["## Where it runs", "", "| runtime | command |", "|---|---|", *rows, ""]


def _has_its_tokenizer(folder: Path, config: Mapping[str, Any], generates: bool) -> bool:
    """Return whether llama.cpp has the tokenizer of a folder, as far as that can be told without the package gguf."""
    rows = config.get("vocab_size")
    if find_spec("gguf") is None or not isinstance(rows, int):
        return True
    from ckpt_prune.gguf.tokenizer import read_tokenizer

    try:
        read_tokenizer(folder, rows, encodes=not generates)
    except UserError:
        return False
    return True
