"""What an output holds beside its tensors: config, report, model card, remote code, and the source's side files."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.folder_kinds import WEIGHT_NAMES, WantedNames
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.checkpoint.staging import Staging, write_atomically
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD, REPORT, ROTATIONS
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.report import Report
from ckpt_prune.job.report_file import report_of
from ckpt_prune.job.run import Announce, Run, say_nothing
from ckpt_prune.job.timing import Stages
from ckpt_prune.model.composites import merge_part_config
from ckpt_prune.model.containers.container import Container
from ckpt_prune.model.containers.remote import REMOTE_MODULE
from ckpt_prune.model.containers.side_files import carried_files, find_side_files, top_names
from ckpt_prune.model.model import Model
from ckpt_prune.modeling_pruned import REFUSAL, WEIGHTS_KEY
from ckpt_prune.report.card import model_card

_CARD = "README.md"


def publish(
    writer: CheckpointWriter,
    report: Report,
    container: Container,
    source: Checkpoint,
    names: Iterable[str],
    stages: Stages,
    announce: Announce = say_nothing,
) -> Report:
    """Write all that is no tensor and put the output in its place.

    Args:
        writer: with every tensor written.
        report: of the output, without digests and stages.
        container: what it is stored as.
        source: the checkpoint whose side files travel along.
        names: files with tensors. Their digests and those of all that is written beside them are in the report.
        stages: of the run so far.
        announce: told which graphs of an old output stay, and are out of date.

    Returns:
        The report, as in the output's ckpt_prune.json.
    """
    with stages.stage("publishing"):
        config = container.config if source.within is None else merge_part_config(source, container.config)
        if container.remote_class is not None:
            config = config | {WEIGHTS_KEY: REFUSAL}
        writer.write_json(CONFIG, config)
        if container.remote_class is not None:
            code = files("ckpt_prune") / f"{REMOTE_MODULE}.py"
            writer.write_text(f"{REMOTE_MODULE}.py", code.read_text(encoding="utf-8"))
        for name, path in carried_files(source).items():
            writer.copy(path, name)
        writer.write_index()
        digests = sha256_files(writer.folder, dict.fromkeys([*names, CONFIG, *sorted(writer.side_names)]))
        carried_files(source)  # raises where one changed while it was copied
    whole = report.model_copy(
        update={
            "stages": stages.records,
            "files": digests,
            "side_files": sorted(writer.side_names - {CONFIG} | {REPORT, _CARD}),
            "job": writer.job,
        }
    )
    writer.write_json(REPORT, whole.data())
    writer.write_text(_CARD, model_card(whole))
    _announce_stale(writer.out, writer.finish(), announce)
    return whole


def publish_copy(run: Run, model: Model, container: Container, report: Report) -> Report:
    """Put a copy of a model in its place, with its rotations if it has any.

    Args:
        run: that has written its tensors (`Run.open_copy`).
        model: that was copied.
        container: what it is stored as.
        report: of the copy, without digests and stages.
    """
    checkpoint, store = model.checkpoint, run.store
    assert store is not None
    assert store.writer is not None
    asides = [ROTATIONS] if (checkpoint.path / ROTATIONS).is_file() else []
    for name in asides:
        store.writer.copy(checkpoint.path / name)
    names = [*store.layout, *asides]
    return publish(store.writer, report, container, checkpoint, names, run.stages, run.announce)


def replace_record(out: Path, report: Report) -> None:
    """Replace report and card of an output that is in its place: no digest is of them.

    The report is last, so that a run which ends between the two has it still to do.

    Raises:
        UserError: they cannot be written.
    """
    write_atomically(out / _CARD, model_card(report))
    write_atomically(out / REPORT, pretty_json(report.data()))


def publish_complete(staging: Staging, announce: Announce) -> Report:
    """Put in its place what an interrupted run has written whole.

    Args:
        staging: entered; its journal says so.
        announce: as of `publish`.

    Returns:
        The report, as in the output's ckpt_prune.json.
    """
    _announce_stale(staging.out, staging.publish(), announce)
    report = report_of(staging.out)
    assert report is not None
    return report


def _announce_stale(out: Path, kept: Iterable[str], announce: Announce) -> None:
    for name in kept:
        if (out / name / GRAPH_RECORD).is_file():
            announce(f"{out / name} was exported from the output that is replaced: export it again")


def wanted_names(source: Checkpoint, recipe: Recipe | None = None) -> WantedNames:
    """Names that an output will have: shards, and what is no tensor.

    Args:
        source: the checkpoint that it is made from.
        recipe: by which; None where a checkpoint is recovered.
    """
    made = {*source.files, CONFIG, REPORT, _CARD, f"{REMOTE_MODULE}.py"}
    if recipe is None or recipe.has("rotation"):
        made.add(ROTATIONS)
    if recipe is not None and recipe.has("export"):
        made.add(GRAPH_FOLDER)
    return top_names(find_side_files(source.path)) | WEIGHT_NAMES | dict.fromkeys(made)
