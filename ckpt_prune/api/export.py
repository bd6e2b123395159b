"""`ckpt_prune.export`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ckpt_prune.api.types import AnyModel, AnyPath, Provider, Texts
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.progress import show_progress
from ckpt_prune.job.graph_settings import AskedTask, GraphSettings
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options import ExportOptions, ProofOptions, SpreadOptions, checked

if TYPE_CHECKING:
    from ckpt_prune.onnx.writing import Exported


def export(
    model: AnyModel,
    *,
    output: AnyPath,
    task: AskedTask = "auto",
    opset: int | None = None,
    dtype: GraphType | Sequence[GraphType] = "fp32",
    cache: bool | None = None,
    optimize: Literal["cpu", "cuda", "none"] = "none",
    tolerance: float | None = None,
    max_loss: float | str | None = None,
    block_size: Literal[16, 32, 64, 128, 256] | None = None,
    symmetric: bool = False,
    accuracy_level: Literal[0, 1, 2, 3, 4] = 4,
    rounding: Literal["nearest", "gptq"] = "nearest",
    dense: AnyModel | None = None,
    max_loss_dense: float | str | None = None,
    proof: bool = True,
    text: Texts = (),
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    seed: int = 0,
    max_corrupt: float = 0.05,
    provider: Provider | None = None,
    device_map: Literal["auto"] | None = None,
    max_memory: str | Sequence[str] = (),
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> "Exported":
    """Write a model as an ONNX graph, as `ckpt-prune export` does. The whole model is loaded, and again to compare.

    Args:
        model: a folder, a Hub id, or what a function of this package has written.
        output: the folder to write; it appears only if the graph computes what the model does.
        task: what the graph is for; "auto": what the checkpoint's own head is.
        opset: ONNX opset; None for 20.
        dtype: of the weights and of what is computed; several make a graph each. int8 rounds inputs too, int4 weights
            alone, q4f16 computes the same in fp16.
        cache: keys and values of earlier tokens as inputs and outputs; None: where text is generated.
        optimize: fuse into onnxruntime's own operators for this provider.
        tolerance: largest difference that passes in fp32 and fp16, in units of the largest output; None: by dtype.
        max_loss: what rounding may cost the task's metric, 0.01 or "1%"; None: 2 % for int8, 10 % for int4 and q4f16.
        block_size: weights that share a scale; None: 32.
        symmetric: blocks have no zero of their own.
        accuracy_level: what onnxruntime may compute products of blocks in.
        rounding: of weights in 4 bits: to the nearest, or by Grams of their inputs.
        dense: a dense model to compare the task's metric with as well.
        max_loss_dense: what may be lost against that; None: it is only measured.
        proof: compare the graph in onnxruntime with PyTorch.
        text: files to compare on; without any, Python's standard library.
        images: folder of images to compare on; without any, noise.
        labels: CSV with columns file and label.
        samples: windows, or images, to compare on.
        window: tokens per window.
        seed: of the random choice of images, and of noise.
        max_corrupt: share of the images that may fail to decode.
        provider: what onnxruntime runs on; None: what the graph is fused for, else cpu.
        device_map: "auto": accelerate puts the parts of the reference where there is room; None for one device.
        max_memory: most that a device takes of it, "cpu=24GiB" or "0=70GiB".
        overwrite: replace an existing export.
        trust_remote_code: run code that a folder brings.
        progress: show bars and notices on stderr.

    Returns:
        What was written and how it compares; `passed` is False where the graph does not compute what the model does,
        and then nothing is written.

    Raises:
        UserError: the model cannot be exported so, or the place is taken.
    """
    given = locals()
    options, settings, proving = (
        checked(ExportOptions, given),
        checked(GraphSettings, given),
        checked(ProofOptions, given),
    )
    spreading = checked(SpreadOptions, given)
    check_texts(proving.text)

    from ckpt_prune.checkpoint.staging import refuse_inside
    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.model.containers.opening import Opening, open_checkpoint
    from ckpt_prune.onnx.folder import GraphWriter
    from ckpt_prune.onnx.proof_data import proof_samples
    from ckpt_prune.onnx.rounding import check_rounded
    from ckpt_prune.onnx.session import provider_for
    from ckpt_prune.onnx.validation import dense_of
    from ckpt_prune.onnx.writing import write_graph

    trust = options.trust_remote_code
    with show_progress(progress), spread(spreading):
        source = open_checkpoint(options.model, Opening(trust))
        refuse_inside(options.output, [proving.images, proving.labels, *proving.text])
        writer = GraphWriter(source, options.output, settings, overwrite=options.overwrite)
        check_rounded(
            settings,
            writer.task,
            images=proving.images is not None,
            provider=options.provider or provider_for(settings.optimize),
        )
        chosen = None
        if options.proof or settings.quantised:
            chosen = proof_samples(source.path, writer.task, proving, trust=trust, rounded=settings.quantised)
        return write_graph(
            writer,
            chosen if options.proof else None,
            measured=chosen,
            provider=options.provider,
            tolerance=settings.tolerance,
            max_loss=settings.max_loss,
            dense=dense_of(options.dense, options.max_loss_dense),
            trust=trust,
        )
