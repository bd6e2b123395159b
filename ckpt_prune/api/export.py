"""`ckpt_prune.export`."""

from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.model_folder import model_name
from ckpt_prune.common.collection import collection_of_new_objects, without_collection
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.commands import ExportOptions
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.options.option import select_options

if TYPE_CHECKING:
    from ckpt_prune.gguf.export import ExportedGguf
    from ckpt_prune.onnx.export import Exported


@takes(ExportOptions)
def export(options: ExportOptions) -> "Exported | ExportedGguf":
    """Write MODEL, also an output of this tool, as an ONNX graph for onnxruntime or as a GGUF file for llama.cpp.

    OUT is complete for deployment: model.onnx, or by --dtype model_fp16.onnx, model_int8.onnx, model_q4.onnx and
    model_q4f16.onnx, with .onnx_data next to a graph of more than 1 GiB, config.json, tokenizer or image processor,
    generation config, validation.json, and a README.md with a few lines that run it. As a new folder onnx inside MODEL
    it is laid out as repositories on the Hub are.

    Batch and length are dynamic. A model that generates text takes input_ids, attention_mask, position_ids and
    past_key_values.i.key and .value, which are empty (length 0) in the first call. It returns logits and present.i.key
    and .value, which the next call takes as its past. With --no-cache it reads whole texts.

    The graph is compared with PyTorch in onnxruntime at several batch sizes and lengths, padded and step by step.
    Outside the tolerance nothing is written, and the exit code is 1. See `ckpt-prune validate`. For graphs in int8 and
    int4 the task's metric is compared, and --max-loss is what it may lose. If all weights in few bits lose more, each
    is measured alone, and the most harmful ones are stored in 8 bits.

    A GGUF file (--format gguf) holds the tokenizer and the chat template too. Blocks of different shapes are written as
    llama.cpp's architecture deci or openelm. The file is compared with PyTorch in llama.cpp: tokens, KL divergence,
    top-1 and perplexity. A model or tokenizer that llama.cpp does not have is refused with the reason.

    Fused graphs (--optimize) have operators of onnxruntime alone. One for cuda is meant for its CUDA provider.

    For ONNX this loads the whole model, and once more to compare. A GGUF file is written tensor by tensor, and only the
    comparison loads the whole model.
    """
    check_texts(options.text)
    if options.format == "gguf":
        return _export_gguf(options)
    settings = select_options(options, GraphSettings)

    with without_collection():
        from ckpt_prune.checkpoint.staging import refuse_inside
        from ckpt_prune.evaluation.device_map import spread
        from ckpt_prune.model.containers.opening import Opening, open_checkpoint
        from ckpt_prune.onnx.export import GraphWriter, write_proven
        from ckpt_prune.onnx.proof import Dense, find_dense
        from ckpt_prune.onnx.quantization.deciding import check_rounding
        from ckpt_prune.onnx.samples import FEW_WINDOWS, WINDOWS, choose_proof_samples
        from ckpt_prune.onnx.session import default_provider
        from ckpt_prune.verification.dense_source import find_dense_source

    trust = options.trust_remote_code
    with spread(options), collection_of_new_objects():
        source = open_checkpoint(options.model, Opening(trust, packed=True))
        refuse_inside(options.output, [options.images, options.labels, *options.text])
        writer = GraphWriter(source, options.output, settings, overwrite=options.overwrite)
        provider = options.provider or default_provider(settings.optimize)
        check_rounding(settings, writer.task, images=options.images is not None, provider=provider)
        samples, dense = None, find_dense(options.dense, options.max_loss_dense)
        found = find_dense_source(source.path) if options.proof and dense is None else None
        if found is not None and found.folder is not None:
            dense = Dense(found.folder)
        elif found is not None:
            Notices()(found.lacking)
        if options.proof or settings.is_rounded:
            windows = WINDOWS if settings.is_rounded or options.dense else FEW_WINDOWS
            samples = choose_proof_samples(
                source.path, writer.task, options, trust=trust, rounded=settings.is_rounded, windows=windows
            )
        return write_proven(
            writer,
            samples,
            proof=options.proof,
            provider=options.provider,
            tolerance=settings.tolerance,
            max_loss=settings.max_loss,
            dense=dense,
            trust=trust,
        )


def _export_gguf(options: ExportOptions) -> "ExportedGguf":
    from ckpt_prune.gguf import require_gguf

    require_gguf()
    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.gguf.export import export_gguf
    from ckpt_prune.onnx.proof import find_dense
    from ckpt_prune.verification.dense_source import DenseSource

    dense = find_dense(options.dense, None)
    with spread(options):
        return export_gguf(
            options.model,
            options.output,
            options,
            kind=options.gguf_type,
            embedding=options.embedding_type,
            proof=options.proof,
            dense=None if dense is None else DenseSource(model_name(dense.folder), dense.folder),
            overwrite=options.overwrite,
            trust=options.trust_remote_code,
        )
