"""The function of each command: its signature, and what it does in words. What it does is in `runner`.

Nothing here loads torch before it is called; what can be refused without it is refused first.
"""

from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.common.collection import collection_of_new_objects, without_collection
from ckpt_prune.common.progress import Notices
from ckpt_prune.gguf import require_gguf
from ckpt_prune.model.composites import takes_all
from ckpt_prune.model.supported import read_model_config
from ckpt_prune.options.commands import (
    BenchmarkOptions,
    CalibrateOptions,
    CompareOptions,
    ConvertOptions,
    EvaluateOptions,
    ExportOptions,
    FrontierOptions,
    InspectOptions,
    PlanOptions,
    PruneOptions,
    PushOptions,
    QuantizeOptions,
    RecoverOptions,
    SweepOptions,
    VerifyOptions,
)
from ckpt_prune.options.machine import SpreadOptions
from ckpt_prune.options.option import select_options
from ckpt_prune.runner.refusals import (
    asked_batches,
    refuse_calibrate,
    refuse_compare,
    refuse_convert,
    refuse_evaluate,
    refuse_export,
    refuse_frontier,
    refuse_inspect,
    refuse_plan,
    refuse_prune,
    refuse_quantize,
    refuse_recover,
    refuse_sweep,
    refuse_verify,
)

if TYPE_CHECKING:
    from ckpt_prune.benchmarking.results import Benchmark
    from ckpt_prune.conversion.stock_checkpoint import Conversion
    from ckpt_prune.evaluation.block_comparison import Comparison
    from ckpt_prune.evaluation.results import Result
    from ckpt_prune.gguf.export import ExportedGguf
    from ckpt_prune.inspection.answer import Description, PartsDescription
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.onnx.export import Exported
    from ckpt_prune.runner.calibrate import ForeseenStatistics
    from ckpt_prune.runner.frontier.record import Frontier
    from ckpt_prune.runner.plan import Planned
    from ckpt_prune.runner.prune import Pruned, Tell
    from ckpt_prune.runner.push import Pushed
    from ckpt_prune.runner.quantize import QuantizedModel
    from ckpt_prune.runner.recover import Recovered
    from ckpt_prune.runner.sweep import Sweep
    from ckpt_prune.runner.verify import Verification


@takes(PruneOptions)
def prune(options: PruneOptions) -> "Pruned":
    """Write a pruned and compensated copy of MODEL that transformers loads.

    A recipe either drops units of spaces, so that the model becomes smaller, or has a mask, which zeroes single weights
    and leaves every shape as it is.

    The default recipe, best-uniform, sets nothing by hand: units, widths, strength and form of compensation are those
    that do the least harm as measured, with the same widths in every block. Recipe best does the same with widths per
    block: it loses less, and OUT then carries its own code to load it with. Where one key of config.json states the
    width of several stacks of blocks (T5, swin), ridge is the default.

    What layers read is known from --statistics or measured on --text, or on --images for a vision model. A sequential
    recipe measures each block behind the already pruned ones, as its paper does; a dense recipe measures the unpruned
    model first. A recipe that looks at weights alone (magnitude) needs neither.

    If a recipe has `recovery`, what stays is trained as `ckpt-prune recover` does it. Each block is trained right after
    it is pruned (for any recipe with --set recovery.epochs=10), or scales of all blocks at the end (--set
    recovery.method=scales). If it has `export` (--set export.format=onnx), OUT/onnx is its graph, or with
    export.format=gguf OUT/model-TYPE.gguf a file for llama.cpp, compared with PyTorch as `ckpt-prune export` does it.
    The exit code is 1 if the graph or file computes something else, and 2 if it cannot be made; OUT is complete without
    it either way. A run that is stopped while it exports leaves OUT.partial.

    A long run starts with an estimate of time, memory and disk; --dry-run always prints one. The output appears only
    when it is complete. An interrupted run leaves OUT.partial, which --resume continues.

    Raises `GraphFailedError`, `EvaluationFailedError` or `PushFailedError`, which are UserErrors, if the output is
    written but its graph cannot be made, or it cannot be measured or pushed.
    """
    return prune_as(options)


def prune_as(options: PruneOptions, tell: "Tell | None" = None) -> "Pruned":
    """Prune, and call `tell` whenever something is complete (`runner.prune.Tell`)."""
    if options.part is None and takes_all(read_model_config(options.model)):
        options = options.model_copy(update={"part": "all"})
    refuse_prune(options)
    from ckpt_prune.runner.read_recipe import read_recipe

    if options.part == "all":
        from ckpt_prune.runner.prune_parts import prune_parts

        return prune_parts(options, tell)
    chosen = read_recipe(options)  # without transformers, which takes seconds
    from ckpt_prune.runner.prune import find_dense_of_stack, prune_model

    return prune_model(options, chosen, tell, dense=find_dense_of_stack(options))


@takes(FrontierOptions)
def frontier(options: FrontierOptions) -> "Frontier":
    """Find what makes MODEL as small as is asked for and loses least: types of its matrices, or fewer columns, too.

    MODEL is measured once on --text: how much each input matters, and what each type of each matrix does to the
    predictions; where fewer bits alone lose much, also what fewer columns of each MLP do. One budget of bytes over both
    says which file to make. It is rounded by error feedback, run in llama.cpp and held against MODEL on --held-out,
    beside the best of llama.cpp's own mixtures if that comes near; of an embedder by the vectors it makes. With --for
    onnxruntime MODEL is traced, each weight of the graph is stored in blocks of 4 or 8 bits or in float32, and int4 and
    int8 everywhere stand beside it. For a size that such bits do not reach, or at which they lose much, columns of each
    MLP are chosen with them, and tokens if MODEL generates text. MODEL may be an encoder, too, or with --images a model
    of images, which is measured on images that it was not fitted to. With --for vllm each weight of a checkpoint gets 4
    or 8 bits, or stays, as `quantize --target-bytes` does it; where that loses much, tokens go, and as many columns of
    each MLP. OUT holds the file, the commands or the recipe that make it, a picture and all figures. What is predicted
    of a file is the sum of what each type of each matrix, and each share of the columns, did on --text by itself. The
    exit code is 1 if nothing usable was found.

    An interrupted run leaves OUT.partial, which --resume continues.
    """
    refuse_frontier(options)
    if options.runs_on == "onnxruntime":
        with without_collection():
            from ckpt_prune.runner.frontier.graphs import explore_graphs

        with collection_of_new_objects():
            return explore_graphs(options)
    if options.runs_on == "vllm":
        from ckpt_prune.runner.frontier.checkpoints import explore_checkpoints

        return explore_checkpoints(options)
    require_gguf(options.model)
    from ckpt_prune.runner.frontier.files import explore_frontier

    return explore_frontier(options)


@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> "Statistics | ForeseenStatistics":
    """Run the dense MODEL over calibration text or images and write its activation statistics.

    One block is in memory at a time. Any recipe can use the statistics for the same model, and `ckpt-prune statistics
    add` adds two folders that were measured on different data. Images go through the checkpoint's own image processor.

    A long run starts with an estimate of time, memory and disk; --dry-run always prints one.
    """
    refuse_calibrate(options)
    from ckpt_prune.runner.calibrate import calibrate_model

    return calibrate_model(options)


@takes(PlanOptions)
def plan(options: PlanOptions) -> "Planned":
    """Decide which units of MODEL stay under a recipe, and predict size and error. Only the plan is written.

    Errors are those of each output projection on the calibration tokens, relative to its output's energy; for q and k,
    those of the attention logits. floor is the least error that any weights and bias on the kept inputs can reach. rho2
    is the share of the dropped output's variance that the kept inputs predict. held out, with statistics of several
    folds, is the error on each fold when fitted on the others. If compensation is chosen on held-out folds (method
    auto), margin says how much worse the next best method is there, relative.
    """
    refuse_plan(options)
    from ckpt_prune.runner.read_recipe import recipe_of

    file, recipe = recipe_of(options)  # without transformers, which takes seconds
    from ckpt_prune.runner.plan import plan_model

    return plan_model(options, file, recipe)


@takes(SweepOptions)
def sweep(options: SweepOptions) -> "Sweep":
    """Plan MODEL at several values of a recipe's key, as `ckpt-prune plan --sweep` does.

    With `evaluate`, every point is pruned into a temporary folder, loaded whole and measured, too. Recipes that no plan
    can describe (masks, factors, rotations, a narrower stream, blocks besides units) and points that are calibrated on
    `text` or `images` are only measured.
    """
    refuse_sweep(options)
    from ckpt_prune.runner.sweep import sweep_model

    return sweep_model(options)


@takes(RecoverOptions)
def recover(options: RecoverOptions) -> "Recovered":
    """Train what PRUNED has left until each of its blocks does what the dense MODEL's does, and write it as OUT.

    PRUNED is an output of this tool of any kind, or a model that another tool pruned, of the same depth and hidden size
    as MODEL. Shapes and dtypes stay, zeros stay zeros, and everything but the linear modules of the blocks stays as it
    is. No labels are used, and one dense and one pruned block are in memory at a time (LaCo: Layer-wise
    Compensation for Pruned Large Language Models).

    A share of the samples is not trained on. It decides, block by block, which epoch's weights are kept: the old ones
    if none is better.

    With --method scales every linear module of the blocks gets a factor for each input and each output, fitted to what
    the dense model predicts (not to its hidden states), and multiplied into the weights. These are few numbers: 32
    windows and one epoch, in steps of one sample, are enough. One block is in memory at a time.

    With --method lora adapters are trained on the linear modules of all blocks at once, by peft, on the next token (or
    on the images' classes), and merged; the whole model is in memory. Zeros are zero again after merging, and the
    weights of the epoch that is best on held-out samples are kept as they are stored, if any is better. With
    --keep-adapter that epoch's adapter is also kept as it is, for PRUNED in peft.

    OUT and MODEL (with --method lora and without it, PRUNED) are measured on windows or images of the data that were
    not trained on, as `prune` measures what it writes.

    The output appears only when it is complete. An interrupted run leaves OUT.partial, which --resume continues with
    the next block, or with the scales or adapters that are fitted; what was half fitted is fitted again.
    """
    refuse_recover(options)
    from ckpt_prune.runner.recover import recover_model

    return recover_model(options)


@takes(QuantizeOptions)
def quantize(options: QuantizeOptions) -> "QuantizedModel | ExportedGguf":
    """Write MODEL, also an output with a stock class, with weights of 8 or 4 bits.

    The linear weights of the blocks get whole numbers, symmetric, each group of columns with a scale of its own. With
    --text they are rounded by GPTQ: later columns make up for earlier ones, and each block is measured behind the
    blocks that are rounded already. Without text and --statistics they are rounded to nearest. Embeddings, norms and
    heads stay as they are, and zeros stay zeros. OUT has the format of compressed-tensors (pack-quantized), which
    transformers loads if that package is installed, and which vLLM reads. One block is in memory at a time, with its
    Gram matrices, and the hidden states of the samples. An interrupted run leaves OUT.partial, which --resume
    continues.

    With --format gguf OUT is one file for llama.cpp, whose embedding and head are rounded, too. ggml rounds each matrix
    by the importance of its inputs, and error feedback does (GPTQ, in ggml's own types); what loses less on held-out
    samples is taken. llama.cpp runs the file before it takes its place.

    `verify OUT --against MODEL` proves it. With data at hand, OUT and MODEL are measured on windows of it that were not
    used for rounding; if MODEL is a pruned model, its dense one is measured too, if it lies beside it.
    """
    refuse_quantize(options)
    from ckpt_prune.runner.quantize import quantize_model

    return quantize_model(options)


@takes(ConvertOptions)
def convert(options: ConvertOptions) -> "Conversion":
    """Write MODEL as the stock class of transformers that computes the same, so that it can be pruned.

    MODEL is timm's plain vit, deit or deit3, as timm published it or in transformers' timm_wrapper, or a masked
    autoencoder (vit_mae), of which the encoder is kept. The output is a vit, or a deit if there is a distillation
    token. Layer scales are absorbed by the projections before them. A model that computes anything else is refused with
    the reason.

    Or MODEL is a folder with a LoRA adapter of peft's. The output is its base model with the adapter merged.

    Or MODEL is a GGUF file of a model that generates text, or of an encoder. The output has its tokenizer and chat
    templates. Rounded weights become float16. If llama.cpp is installed, it runs the file on a text and PyTorch the
    output: tokens, KL divergence, top-1 and perplexity, or of an encoder hidden states and embeddings. If they compute
    something else, nothing is kept, and the exit code is 1.

    An interrupted run leaves OUT.partial, which --resume continues.
    """
    refuse_convert(options)
    from ckpt_prune.runner.convert import convert_model

    return convert_model(options)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> "Verification":
    """Prove that OUT is whole: it loads, is finite, and agrees with its config and the digests in ckpt_prune.json.

    For a masked OUT, the zeros and the pattern that its report states are counted in every weight. For an exported
    graph, alone or in OUT/onnx: the files, operators and weights, that onnxruntime loads it, and that it is the one
    that validation.json says passed.

    This loads the whole model once. The exit code is 1 if a check fails.
    """
    refuse_verify(options)
    from ckpt_prune.runner.verify import verify_output

    return verify_output(options)


@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> "Result":
    """Measure MODEL: perplexity on text, accuracy on images, tasks, or show what it writes.

    Text. Perplexity takes windows of T tokens that do not overlap, drops the tail, does not score the first token of a
    window, and is exp of the mean. Each --text is measured by itself; of several, the last line, and the outer keys of
    JSON, are over the tokens of all. Two protocols are in use, windows of 128 and of 2048 tokens, and they differ by a
    factor of two on the same model: every figure is printed with its window. KL is the mean over scored tokens of
    KL(MODEL2 || MODEL), in nats. --samples N scores the first N windows of each text, where calibrate takes N at random
    from all texts together, in equal shares. How hard a text is differs along it: compare such a figure only with
    others of the same text, window and N.

    Other text models. A masked language model (BERT) predicts 15 % of the tokens of every window, masked. A classifier
    of texts or tokens, and a model that finds answers, is compared with MODEL2: KL divergence, and how often both put
    the same first. A reranker or reward model is compared by the order of its numbers, and a base model without a head
    by the cosine of its features. A sentence-transformers folder embeds every line of the text that is not empty, cut
    to T tokens. Compared are the cosine of both embeddings, the rank correlation of the cosines of all pairs of lines,
    and how often both find the same line nearest to another.

    Images. Top-1 and top-5 of an image classifier; with --against also how often both put the same class first, and the
    mean KL over images. Shares have their standard errors. If a labels.csv has a column split, its rows of split eval
    are taken. Preprocessing is the checkpoint's own (preprocessor_config.json), by Pillow. --samples takes images at
    random, because the first ones would be those of the first classes.

    Tasks. Items of a .jsonl file are answered by the likeliest continuation, as EleutherAI's harness does it: accuracy
    by plain log-probability, norm. by that per character, next to the chance of guessing. They have the shape of ARC,
    OpenBookQA, PIQA, WinoGrande or BoolQ, or question, choices (a list) and answer (from 0). A model with a
    sequence-classification head labels texts: tasks of GLUE (glue:cola, sst2, mrpc, qqp, stsb, mnli, mnli-mm, qnli,
    rte, wnli; their validation splits, from FOLDER, $CKPT_PRUNE_DATA/glue or the Hub), or rows of a .jsonl file with
    label and the columns of one of these. Metrics are GLUE's: Matthews' correlation for CoLA, accuracy and F1 for MRPC
    and QQP, Pearson's and Spearman's correlation for STS-B, accuracy for the others.

    --generate shows what a perplexity hides: a model that repeats itself has a plausible one. Repeated is the share of
    runs of four tokens that were there before.

    --text, --tasks and --generate may be given together: each model is then loaded once, --samples applies to text and
    tasks, and --json has an object for each of them.

    MODEL and MODEL2 may be ONNX graphs, of this tool or another, next to their config and tokenizer or image processor
    (OUT/onnx/model_q4.onnx), or a folder with one graph; onnxruntime runs them on the CPU. Causal language models run
    on --text block by block, one model after the other. Otherwise whole models are loaded, both with --against;
    --device-map auto spreads them over GPUs, memory and disk.

    If MODEL is a folder that `prune` wrote, and MODEL2 the model that it was made from, the result is also noted in its
    model card and ckpt_prune.json, in place of an earlier one. Noted are the perplexity or accuracy of both, and the
    text or images. A read-only folder stays as it is.

    Returns one of `ckpt_prune.evaluation.results`, or a `CombinedResult` of several.
    """
    refuse_evaluate(options)
    from ckpt_prune.runner.evaluate import evaluate_model

    return evaluate_model(options)


@takes(CompareOptions)
def compare(options: CompareOptions) -> "Comparison":
    """Compare what leaves every block of B with what leaves that of A, usually the dense model, on the same samples.

    Both models have the same hidden size and, but for an output of this tool that lost whole blocks, the same depth. B
    may be an output of this tool, or a model that another tool pruned, quantized or trained and saved as plain weights.
    Both run side by side, one block of each in memory at a time. Where B lost blocks, each of its blocks stands for
    those of A that the table names: the one that it was, and those that are gone behind it.

    MSE is the mean squared difference of hidden states. Relative error is the squared difference over A's squared
    length. Cosine is the mean over tokens. CKA is linear centred kernel alignment, which no rotation of the states
    changes. The last line compares the outputs: KL(A || B) in nats, or for a model without a head the relative error of
    its last hidden states. If B's hidden states are rotated, A's are rotated alike. Hidden states beyond --state-memory
    go to files in the temporary folder.
    """
    refuse_compare(options)
    from ckpt_prune.runner.compare import compare_models

    return compare_models(options)


@takes(InspectOptions)
def inspect(options: InspectOptions) -> "Description | PartsDescription":
    """Print what MODEL is: family, spaces and their widths, sizes, and the containers that a pruned copy would fit.

    An encoder-decoder has two stacks of blocks: both are printed, unless --part names one. Only the config and the
    headers of the weights are read, unless --sparsity is given. For counting, a folder with nothing but a config.json
    is enough. If MODEL's family has no description, its spaces are found on a small random model of its class, and the
    output tells how each is proven; with --json it holds the description. For a folder that `export` wrote, the graphs
    are printed: types, bytes, what they were made from, and whether they were proven.
    """
    refuse_inspect(options)
    from ckpt_prune.inspection.describe import inspect_model

    return inspect_model(options)


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
    llama.cpp's architecture deci or openelm. The file is compared with PyTorch in llama.cpp: tokens, and at 16 places
    of each window KL divergence, top-1 and perplexity. A model or tokenizer that llama.cpp does not have is refused
    with the reason.

    Fused graphs (--optimize) have operators of onnxruntime alone. One for cuda is meant for its CUDA provider.

    For ONNX this loads the whole model, and once more to compare. A GGUF file is written tensor by tensor, and only the
    comparison loads the whole model.
    """
    refuse_export(options)
    with without_collection():
        from ckpt_prune.runner.export import export_model

    return export_model(options)


@takes(BenchmarkOptions)
def benchmark(options: BenchmarkOptions) -> "Benchmark":
    """Time A, the dense model, against B, the pruned one: latency, throughput, size and peak memory.

    Both are loaded whole, each in a process of its own, a second time for --onnx, and all stay in memory together. They
    take turns: a round times each of them once, so that whatever else the machine does slows all of them alike. A
    process that waits does not compute. Percentiles are of all timings, throughput is that of the median. Few rounds
    say little about p95.

    Both get the same random tokens or images (seed 0). A causal language model reads the text (prefill) and then
    generates token by token with the cache (decode, timed by the token); other models read it in one pass. Ratios are
    relative to A in the same runtime. Peak memory is that of a process; the base next to it is what the process takes
    without a model. GPU memory is known for PyTorch, not for onnxruntime.

    With --onnx a checkpoint is exported, unless its own folder onnx has a graph of it for the same task. Such graphs
    stay in the folder for temporary files (TMPDIR) until the run ends; it must have room for both. A and B may also be
    folders that `export` wrote: these run in onnxruntime alone.
    """
    batches = asked_batches(options.batches)
    from ckpt_prune.benchmarking.run import compare

    return compare(options, batches, select_options(options, SpreadOptions), Notices())


@takes(PushOptions)
def push(options: PushOptions) -> "Pushed":
    """Share OUT, an output of this tool, as the Hub's repository REPO: private, unless --public is given.

    Only files that this tool wrote are pushed: weights, config, tokenizer, report, model card, licence, and the graph
    in OUT/onnx. OUT is verified first (`ckpt-prune verify`), which loads the whole model; if a check fails, nothing is
    pushed. Everything goes in one commit. The token is that of `hf auth login` or HF_TOKEN.
    """
    from ckpt_prune.runner.push import push_output

    return push_output(options)
