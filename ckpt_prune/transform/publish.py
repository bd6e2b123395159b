"""What an output holds beside its tensors: config, report, model card, remote code, and the source's side files."""

from collections.abc import Iterable
from importlib.resources import files

from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.reading import CONFIG, Checkpoint
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.containers.container import Container
from ckpt_prune.containers.remote import REMOTE_MODULE
from ckpt_prune.containers.side_files import side_files
from ckpt_prune.filenames import REPORT
from ckpt_prune.report.card import model_card
from ckpt_prune.report.model import Report
from ckpt_prune.report.stages import Stages


def publish(
    writer: CheckpointWriter,
    report: Report,
    container: Container,
    source: Checkpoint,
    names: Iterable[str],
    stages: Stages,
) -> Report:
    """Write all that is no tensor and put the output in its place.

    Args:
        writer: with every tensor written.
        report: of the output, without digests and stages.
        container: what it is stored as.
        source: the checkpoint whose side files travel along.
        names: files whose digests the report gets, beside the config's.
        stages: of the run so far.

    Returns:
        The report, as in the output's ckpt_prune.json.
    """
    with stages.stage("publishing"):
        writer.write_json(CONFIG, container.config)
        digests = sha256_files(writer.folder, [*names, CONFIG])
        if container.remote_class is not None:
            code = files("ckpt_prune") / f"{REMOTE_MODULE}.py"
            writer.write_text(f"{REMOTE_MODULE}.py", code.read_text(encoding="utf-8"))
        for path in side_files(source.path):
            writer.copy(path)
    whole = report.model_copy(update={"stages": stages.records, "files": digests})
    writer.write_json(REPORT, whole.data())
    writer.write_text("README.md", model_card(whole))
    writer.finish()
    return whole
