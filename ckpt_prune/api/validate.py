"""`ckpt_prune.validate`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.model_folder import check_output_folder, find_graph, resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.commands import ValidateOptions

if TYPE_CHECKING:
    from ckpt_prune.onnx.outcome import Validations


@takes(ValidateOptions)
def validate(options: ValidateOptions) -> "Validations":
    """Prove that the graph in DIR computes in onnxruntime what MODEL computes in PyTorch.

    Checks the files' digests, runs onnx.checker, compares inputs and outputs with the model's, and runs both on the
    same text or images: in several batch sizes and lengths, with padding, and, if the graph has a cache, in chunks and
    step by step as text is generated. PyTorch computes in float32 with the checkpoint's own values. Then the task's own
    metric is measured in both: perplexity (of masked tokens for BERT), top-1, or the cosine of features.

    This loads the whole model once. The result is printed and kept in DIR/validation.json. The exit code is 1 if
    anything is outside the tolerance, with a table of where.
    """
    name = options.folder
    graph = find_graph(name) if options.metric_only and not (Path(name) / GRAPH_RECORD).is_file() else None
    place = check_output_folder(Path(name)) if graph is None else graph
    check_texts(options.text)

    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.onnx import metric_only as only
    from ckpt_prune.onnx import validation
    from ckpt_prune.onnx.apart import sessions_apart
    from ckpt_prune.onnx.manifest import read_manifest
    from ckpt_prune.onnx.proof_data import proof_samples

    trust = options.trust_remote_code
    with sessions_apart(), spread(options):
        if options.against is not None:
            model = resolve_model(options.against)
        elif graph is not None and only.recorded(graph) is None:
            raise UserError(f"{graph} has no record of what it was made from: give --against MODEL")
        else:
            where = place if graph is None else graph.parent
            model = validation.own_source(where, read_manifest(where))
        dense_model = validation.dense_of(options.dense, options.max_loss_dense)
        if graph is None and (told := _other_data(place, options)) is not None:
            Notices()(told)
        if options.metric_only:
            return only.metric_only(place, model, options, provider=options.provider, dense=dense_model, trust=trust)
        chosen = proof_samples(place, read_manifest(place).what, options, trust=trust)
        found = validation.validate(
            place,
            model,
            chosen,
            provider=options.provider,
            tolerance=options.tolerance,
            max_loss=options.max_loss,
            dense=dense_model,
            trust=trust,
        )
        found.write(place)
        return found


def _other_data(place: Path, options: ValidateOptions) -> str | None:
    """That a folder was last compared on data that is not given now; None where it is, or where none was."""
    from ckpt_prune.onnx.outcome import read_validation

    if options.text or options.images is not None:
        return None
    try:
        last = read_validation(place).graphs[0].data
    except (UserError, IndexError):
        return None
    if not last.get("files"):
        return None
    return (
        f"{place} was last compared on {last.get('what')}, which is not given: these figures are of other data, and do "
        "not compare with those"
    )
