"""`ckpt_prune.evaluate`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.model_folder import find_graph
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.common.text_encoding import has_row_suffix
from ckpt_prune.datasets.glue import parse_task_name
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.commands import EvaluateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ckpt_prune.evaluation.pair import Pair
    from ckpt_prune.evaluation.results import Result
    from ckpt_prune.evaluation.streamed import StreamedModel


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
    mean KL over images. Preprocessing is the checkpoint's own (preprocessor_config.json), by Pillow. --samples takes
    images at random, because the first ones would be those of the first classes.

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
    if not options.dry_run:
        _check(options)
    check_texts(options.text)
    result = _measure(options)
    if options.against is not None and not options.dry_run:
        _note_loss(options, result)
    return result


def _measure(options: EvaluateOptions) -> "Result":
    from ckpt_prune.evaluation.answers import measure_choices, measure_generation
    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.evaluation.images import measure_images
    from ckpt_prune.evaluation.label_tasks import is_labelled, measure_labelled
    from ckpt_prune.evaluation.memory_plan import memory_plans
    from ckpt_prune.evaluation.pair import Pair
    from ckpt_prune.evaluation.results import CombinedResult
    from ckpt_prune.evaluation.texts import measure_texts
    from ckpt_prune.evaluation.whole_model import default_dtype
    from ckpt_prune.parallel.devices import resolve_device

    with spread(options) as places:
        target = resolve_device(options.device)
        graph, folder = _place(options.model)
        if options.dry_run:
            both = [folder] if options.against is None else [folder, _place(options.against)[1]]
            if places is None:
                return _foresee_text(Pair(folder, both[-1] if both[1:] else None, target, False), options)
            return memory_plans(both, places, default_dtype(target))
        names = _names(options.tasks)
        other, reference = (None, None) if options.against is None else _place(options.against)
        labelled = any(map(parse_task_name, names)) or (_are_files(names) and is_labelled(folder))
        if options.generate and (graph or other) is not None:
            raise UserError(f"{graph or other} is a graph: --generate is for checkpoints; validate lets both continue")
        measures = [bool(options.text), bool(names), bool(options.generate)]
        trust, keeps = options.trust_remote_code, sum(measures) > 1 or len(options.text) > 1
        pair = Pair(folder, reference, target, trust, graph, other, _open_graph, keeps=keeps, foresee=_foresee)
        results: dict[str, Result] = {}
        # Answers first: they are quick, and refuse what does not suit the model before the long run over the text.
        if options.generate:
            results["generate"] = measure_generation(pair, options.generate, options.generate_tokens)
        if names and labelled:
            results["tasks"] = measure_labelled(pair, names, options.samples)
        elif names and _are_files(names):
            results["tasks"] = measure_choices(pair, [Path(name) for name in names], options.samples, options.bos)
        elif names:
            results["tasks"] = _lm_eval(options, names, pair)
        if options.text:
            results["text"] = measure_texts(pair, options)
        if len(results) > 1:
            return CombinedResult({name: results[name] for name in ("text", "tasks", "generate") if name in results})
        if results:
            return next(iter(results.values()))
        return measure_images(pair, options)


def _note_loss(options: EvaluateOptions, result: "Result") -> None:
    """Put what was measured into card and record of an output, if the reference is what it was made from."""
    from ckpt_prune.runner.publish import note_loss
    from ckpt_prune.verification.dense_source import is_source

    out, dense, loss = Path(options.model), Path(str(options.against)), result.loss()
    if loss is None or not (out.is_dir() and os.access(out, os.W_OK)) or find_graph(options.model) is not None:
        return  # in the Hub's cache, too, nothing is changed
    if not is_source(out, dense):
        return
    # Names without folders: a card is shown to others.
    read = [Path(text).name for text in options.text] or [Path(str(options.images)).name]
    loss = loss.model_copy(update={"data": ", ".join([*read, loss.data])})
    try:
        note_loss(out, loss)
    except UserError as error:
        Notices()(f"the model card of {out} does not say what was measured: {error}")


def _lm_eval(options: EvaluateOptions, names: Sequence[str], pair: "Pair") -> "Result":
    from ckpt_prune.evaluation.harness import run_tasks, tabulate
    from ckpt_prune.evaluation.purpose import check_generates

    graph = pair.graph or pair.reference_graph
    if graph is not None:
        raise UserError(f"{graph} is a graph: it is measured with --text, --images or --tasks FILE.jsonl")
    for path in (pair.folder, pair.reference):
        if path is not None:
            check_generates(path, "image-text-to-text")

    def tables(folder: Path, load: "Callable[[], PreTrainedModel]") -> dict[str, Any]:
        model = load() if pair.keeps else None
        return run_tasks(
            folder, names, device=pair.device, limit=options.samples, include_path=options.include_path, model=model
        )

    other = None if pair.reference is None else tables(pair.reference, pair.load_reference)
    return tabulate(pair.folder, tables(pair.folder, pair.load), pair.reference, other)


def _place(name: str) -> tuple[Path | None, Path]:
    """Return the graph that a model is, if it is one, and its folder."""
    from ckpt_prune.checkpoint.model_folder import refuse_adapter, resolve_model

    graph = find_graph(name)
    folder = resolve_model(name) if graph is None else graph.parent
    refuse_adapter(folder)
    return graph, folder


def _open_graph(path: Path) -> "PreTrainedModel":
    from ckpt_prune.onnx.session import open_graph

    return open_graph(path, "cpu")


def _foresee(models: "Sequence[StreamedModel]", windows: int, window: int) -> None:
    """Say what measuring takes, if that is long or more than there is."""
    from ckpt_prune.runner.estimate import estimate_evaluation

    warning = estimate_evaluation(models, windows, window).warning if models else None
    if warning is not None:
        Notices()(warning)


def _foresee_text(pair: "Pair", options: EvaluateOptions) -> "Result":
    from ckpt_prune.evaluation.results import PlainResult
    from ckpt_prune.evaluation.texts import read_windows
    from ckpt_prune.measure.samples.text import load_tokenizer
    from ckpt_prune.runner.estimate import estimate_evaluation

    models = pair.find_streamed()
    if not options.text or options.window is None or len(models) < len(set(pair.folders)):
        raise UserError(
            "--dry-run tells what it takes to measure causal language models on --text in windows of --window, or, "
            "with --device-map auto, where the parts of any model would go"
        )
    tokenizer = load_tokenizer(pair.folder)
    windows = sum(len(read_windows(text, tokenizer, options)) for text in options.text)
    estimate = estimate_evaluation([models[folder] for folder in pair.folders], windows, options.window)
    return PlainResult({"estimate": estimate.data()}, [f"it takes {estimate.line}"])


def _names(tasks: str | None) -> list[str]:
    return [name.strip() for name in (tasks or "").split(",") if name.strip()]


def _are_files(names: Sequence[str]) -> bool:
    return all(map(has_row_suffix, names))


def _check(options: EvaluateOptions) -> None:
    given = {
        "--text": bool(options.text),
        "--images": options.images is not None,
        "--tasks": options.tasks is not None,
        "--generate": bool(options.generate),
    }
    given_flags = [name for name, there in given.items() if there]
    if len(given_flags) > 1 and options.images is not None:
        raise UserError(f"{' and '.join(given_flags)}: a model reads either images or text; measure each by itself")
    if not given_flags:
        raise UserError("evaluate needs --text FILE, --images DIR for a vision model, --tasks, or --generate PROMPT")
    if options.text and options.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
    if not options.text and options.window is not None:
        raise UserError(f"--window goes with --text, not with {given_flags[0]}")
    if options.tasks is not None:
        _check_tasks(options)


def _check_tasks(options: EvaluateOptions) -> None:
    names = _names(options.tasks)
    files = [name for name in names if has_row_suffix(name)]
    glue = [name for name in names if parse_task_name(name) is not None]
    if not names:
        raise UserError("--tasks names no task: give .jsonl files of items, or names of lm-eval tasks")
    if glue and len(glue) + len(files) < len(names):
        raise UserError("--tasks: tasks of GLUE and lm-eval's own are run in calls of their own")
    if files and not glue and len(files) < len(names):
        raise UserError("--tasks: .jsonl files and lm-eval's own tasks are run in calls of their own")
    missing = [name for name in files if not Path(name).is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file of items")
    if (files or glue) and options.include_path is not None:
        given = ".jsonl files" if files else glue[0]
        raise UserError(f"--include-path is for lm-eval tasks: it does not go with {given}")
    if not files and not glue and options.trust_remote_code:
        raise UserError("lm-eval tasks never run a checkpoint's own code: leave --trust-remote-code out")
