"""`ckpt_prune.validate`."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.model_folder import (
    check_output_folder,
    find_recorded_source,
    resolve_model,
    way_to_source,
)
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import FRONTIER_FILE, FRONTIER_RECORD, GRAPH_RECORD, REPORT
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.commands import ValidateOptions

if TYPE_CHECKING:
    from ckpt_prune.onnx.records import Validations
    from ckpt_prune.runtimes.comparison import Proof, RuntimeProof


@takes(ValidateOptions)
def validate(options: ValidateOptions) -> "Validations | Proof":
    """Prove that the graphs in DIR compute in onnxruntime what MODEL computes in PyTorch.

    DIR is a folder that `export` wrote. A graph in it, such as OUT/onnx/model.onnx, stands for the folder: all its
    graphs are compared.

    Checks the files' digests, runs onnx.checker, and compares inputs and outputs with the model's. Then both run on the
    same text or images: in several batch sizes and lengths, with padding, and, if the graph has a cache, in chunks and
    step by step as text is generated. PyTorch computes in float32 with the checkpoint's own values. Then the task's own
    metric is measured in both: perplexity (of masked tokens for BERT), top-1, or the cosine of features.

    This loads the whole model once. The result is printed and kept in DIR/validation.json. The exit code is 1 if
    anything is outside the tolerance, with a table of where.

    A GGUF file is compared in llama.cpp: tokens of texts, and at 16 places of each window KL divergence, top-1 and
    perplexity. --runtime does the same in other runtimes, if they are installed, with a checkpoint or an exported
    folder.
    """
    name = _folder_of(options.folder, options.runtime)
    options = options.model_copy(update={"folder": name})
    is_file = name.endswith(".gguf") and Path(name).is_file()
    if options.max_loss_dense is not None and (is_file or options.runtime not in (None, "onnxruntime")):
        raise UserError("--max-loss-dense goes with onnxruntime: what is lost is only measured elsewhere")
    if is_file:
        return _validate_gguf(options)
    if name.endswith(".gguf") and not Path(name).exists():
        raise UserError(f"{name} does not exist; give a GGUF file, or a folder that this tool wrote")
    if options.runtime == "llama.cpp":
        raise UserError(
            f"{name} is no GGUF file, which llama.cpp runs: write one with `ckpt-prune export --format gguf`"
        )
    if options.runtime not in (None, "onnxruntime"):
        if options.dense is not None:
            raise UserError("--dense goes with onnxruntime and llama.cpp: --against MODEL compares with one model")
        return _validate_in_runtime(options)
    place = check_output_folder(Path(name))
    if not (place / GRAPH_RECORD).is_file() and any(place.glob("*.safetensors")):
        raise UserError(f"{name} is a checkpoint, with no graph beside it: --runtime transformers, vllm or mlx runs it")
    check_texts(options.text)

    from ckpt_prune.checkpoint.checkpoint import Checkpoint
    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.onnx import proof
    from ckpt_prune.onnx.records import read_manifest
    from ckpt_prune.onnx.samples import FEW_WINDOWS, WINDOWS, choose_proof_samples

    trust, provider = options.trust_remote_code, options.provider
    with spread(options):
        manifest = read_manifest(place)
        model = proof.find_source(place, manifest) if options.against is None else resolve_model(options.against)
        dense = proof.find_dense(options.dense, options.max_loss_dense, model)
        _warn_of_other_data(place, options)
        rounded = any(entry.quantization is not None for entry in manifest.graphs)
        windows = WINDOWS if rounded or dense else FEW_WINDOWS
        read_by = Checkpoint.open(model, packed=True) if manifest.modality == "pairs" else None
        validations = proof.validate(
            place,
            model,
            choose_proof_samples(place, manifest.full_task, options, trust=trust, windows=windows, checkpoint=read_by),
            provider=provider,
            tolerance=options.tolerance,
            max_loss=options.max_loss,
            dense=dense,
            trust=trust,
        )
        validations.write(place)
        return validations


def _folder_of(name: str, runtime: str | None) -> str:
    """Return the folder of a graph, the only GGUF file of a folder without graphs, and other names as they are.

    Beside that of `frontier` may lie one that its commands have made again.
    """
    path = Path(name)
    files = [] if (path / GRAPH_RECORD).is_file() else [*path.glob("*.gguf")]
    if (path / FRONTIER_RECORD).is_file() and (path / FRONTIER_FILE).is_file():
        files = [path / FRONTIER_FILE]
    if len(files) == 1 and runtime in (None, "llama.cpp"):
        return str(files[0])
    return str(path.parent) if path.suffix == ".onnx" and path.is_file() else name


def _validate_gguf(options: ValidateOptions) -> "Proof":
    from ckpt_prune.gguf import require_gguf

    require_gguf()
    place = Path(options.folder).parent
    beside = place if (place / REPORT).is_file() else None  # whose recipe has written it
    against = options.against or find_recorded_source(place) or beside
    if options.runtime == "onnxruntime" or against is None:
        made_from = f"give --against MODEL, the checkpoint that it was made from{way_to_source(place)}"
        lacking = "llama.cpp runs it" if against else made_from
        raise UserError(f"{options.folder} is a GGUF file: {lacking}")
    check_texts(options.text)

    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.gguf.export import validate_gguf
    from ckpt_prune.runner.export import dense_of_file

    with spread(options):
        dense, trust = dense_of_file(options.dense, resolve_model(str(against))), options.trust_remote_code
        return validate_gguf(Path(options.folder), str(against), options, dense=dense, trust=trust)


def _validate_in_runtime(options: ValidateOptions) -> "RuntimeProof":
    from ckpt_prune.runtimes.proof import RuntimeName, require_runtime, validate_in

    runtime = cast(RuntimeName, options.runtime)
    require_runtime(runtime)
    check_texts(options.text)

    from ckpt_prune.evaluation.device_map import spread

    against = None if options.against is None else resolve_model(options.against)
    with spread(options):
        return validate_in(runtime, resolve_model(options.folder), against, options, trust=options.trust_remote_code)


def _warn_of_other_data(place: Path, options: ValidateOptions) -> None:
    """Say that a folder was last compared on data that is not given now."""
    from ckpt_prune.onnx.records import read_validation

    if options.text or options.images or options.data:
        return
    try:
        last = read_validation(place).graphs[0].data
    except (UserError, IndexError):
        return
    if last.get("files"):
        Notices()(
            f"{place} was last compared on {last.get('what')}, which is not given: these figures are of other data, "
            "and do not compare with those"
        )
