"""`ckpt_prune.validate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckpt_prune.api.types import AnyModel, AnyPath, Provider, Texts
from ckpt_prune.checkpoint.model_folder import check_output_folder, find_graph, resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options import SpreadOptions, ValidateOptions, checked, path_of

if TYPE_CHECKING:
    from ckpt_prune.onnx.outcome import Validations


def validate(
    folder: AnyModel,
    *,
    against: AnyModel | None = None,
    metric_only: bool = False,
    text: Texts = (),
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    seed: int = 0,
    max_corrupt: float = 0.05,
    tolerance: float | None = None,
    max_loss: float | str | None = None,
    dense: AnyModel | None = None,
    max_loss_dense: float | str | None = None,
    provider: Provider | None = None,
    device_map: Literal["auto"] | None = None,
    max_memory: str | Sequence[str] = (),
    trust_remote_code: bool = False,
    progress: bool = True,
) -> "Validations":
    """Compare an exported graph with its model again, as `ckpt-prune validate` does. The whole model is loaded.

    Args:
        folder: what `export` wrote; with `metric_only` also a graph of another tool's, or a folder with one.
        against: the checkpoint that it was exported from; None where the folder lies in it, or beside it.
        metric_only: measure what is lost of the task's metric and nothing else; nothing is written.
        text: files to compare on; without any, Python's standard library.
        images: folder of images to compare on; without any, noise.
        labels: CSV with columns file and label.
        samples: windows, or images, to compare on.
        window: tokens per window.
        seed: of the random choice of images, and of noise.
        max_corrupt: share of the images that may fail to decode.
        tolerance: largest difference that passes in fp32 and fp16, in units of the largest output; None: by dtype.
        max_loss: what rounding may have cost the task's metric, 0.01 or "1%"; None: by dtype.
        dense: another model to compare the task's metric with as well.
        max_loss_dense: what may be lost against that; None: it is only measured.
        provider: what onnxruntime runs on; None: what the graph is fused for, else cpu.
        device_map: "auto": accelerate puts the parts of the model where there is room; None for one device.
        max_memory: most that a device takes of it, "cpu=24GiB" or "0=70GiB".
        trust_remote_code: run code that a folder brings.
        progress: show bars and notices on stderr.

    Returns:
        What came out, as in the folder's validation.json.

    Raises:
        UserError: there is no graph, or the data does not suit it.
    """
    given = locals()
    options, spreading = checked(ValidateOptions, given), checked(SpreadOptions, given)

    name = path_of(folder)
    graph = find_graph(name) if metric_only and not (Path(name) / GRAPH_RECORD).is_file() else None
    place = check_output_folder(Path(name)) if graph is None else graph
    check_texts(options.text)

    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.onnx import metric_only as only
    from ckpt_prune.onnx import validation
    from ckpt_prune.onnx.apart import sessions_apart
    from ckpt_prune.onnx.manifest import read_manifest
    from ckpt_prune.onnx.proof_data import proof_samples

    trust = trust_remote_code
    with show_progress(progress), sessions_apart(), spread(spreading):
        if against is not None:
            model = resolve_model(path_of(against))
        elif graph is not None and only.recorded(graph) is None:
            raise UserError(f"{graph} has no record of what it was made from: give --against MODEL")
        else:
            where = place if graph is None else graph.parent
            model = validation.own_source(where, read_manifest(where))
        dense_model = validation.dense_of(options.dense, options.max_loss_dense)
        if graph is None and (told := _other_data(place, options)) is not None:
            Notices()(told)
        if metric_only:
            return only.metric_only(place, model, options, provider=provider, dense=dense_model, trust=trust)
        chosen = proof_samples(place, read_manifest(place).what, options, trust=trust)
        found = validation.validate(
            place,
            model,
            chosen,
            provider=provider,
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
