"""`evaluate`: what MODEL is worth, alone or beside another."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ckpt_prune.checkpoint.model_folder import find_graph, refuse_adapter, resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.common.text_encoding import has_row_suffix
from ckpt_prune.datasets.glue import parse_task_name
from ckpt_prune.datasets.suites import NamedSuite, parse_suite
from ckpt_prune.evaluation.answers import measure_choices, measure_generation, name_files
from ckpt_prune.evaluation.device_map import DeviceMap, spread
from ckpt_prune.evaluation.image_maps import measure_maps
from ckpt_prune.evaluation.images import measure_images
from ckpt_prune.evaluation.label_tasks import is_labelled, measure_labelled
from ckpt_prune.evaluation.memory_plan import memory_plans
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_generates
from ckpt_prune.evaluation.quality import figures_of
from ckpt_prune.evaluation.results import CombinedResult, PlainResult, Result
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.evaluation.texts import measure_rows, measure_texts, read_windows
from ckpt_prune.evaluation.whole_model import default_dtype
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.options.commands import EvaluateOptions
from ckpt_prune.parallel.devices import resolve_device
from ckpt_prune.runner.estimate import estimate_evaluation
from ckpt_prune.runner.publish import note_loss
from ckpt_prune.verification.dense_source import is_source


def evaluate_model(options: EvaluateOptions) -> Result:
    """Measure a model, or say what that takes, and note what was measured in an output (`ckpt_prune.evaluate`)."""
    with spread(options) as places:
        graph, folder = _place(options.model)
        other, reference = (None, None) if options.against is None else _place(options.against)
        device = resolve_device(options.device)
        keeps = (
            sum(map(bool, (options.text, options.data, options.tasks, options.generate))) > 1 or len(options.text) > 1
        )
        trust = options.trust_remote_code
        pair = Pair(
            folder, reference, device, trust, graph, other, _open_graph, tells_noise=True, keeps=keeps, foresee=_foresee
        )
        if options.dry_run:
            return _foresee_all(pair, options, places)
        result = _measure(pair, options)
    if options.against is not None:
        _note_loss(options, result)
    return result


def _measure(pair: Pair, options: EvaluateOptions) -> Result:
    names, results = options.task_names, dict[str, Result]()
    suite = parse_suite(names[0]) if names else None
    of_files = all(map(has_row_suffix, names))
    labelled = any(map(parse_task_name, names)) or (of_files and is_labelled(pair.folder))
    graph = pair.graph or pair.reference_graph
    # Answers first: they are quick, and refuse what does not suit the model before the long run over the text.
    if options.generate:
        if graph is not None:
            raise UserError(f"{graph} is a graph: --generate is for checkpoints; validate lets both continue")
        results["generate"] = measure_generation(pair, options.generate, options.generate_tokens)
    if suite is not None:
        results["tasks"] = _measure_suite(suite, pair, options)
    elif names and labelled:
        results["tasks"] = measure_labelled(pair, names, options.samples)
    elif names and of_files:
        results["tasks"] = measure_choices(
            pair, name_files([Path(name) for name in names]), options.samples, options.bos
        )
    elif names:
        results["tasks"] = _lm_eval(options, names, pair)
    if options.text:
        results["text"] = measure_texts(pair, options)
    if options.data is not None:
        results["data"] = measure_rows(pair, options)
    if len(results) > 1:
        return CombinedResult(
            {name: results[name] for name in ("text", "data", "tasks", "generate") if name in results}
        )
    if results:
        return next(iter(results.values()))
    return measure_images(pair, options) if options.depth is options.segmentation else measure_maps(pair, options)


def _measure_suite(suite: NamedSuite, pair: Pair, options: EvaluateOptions) -> Result:
    """Measure the tasks of a paper, from files if there are any, else by lm-eval; and their mean."""
    files = suite.files()
    tables = (
        measure_choices(pair, files, options.samples, options.bos) if files else _lm_eval(options, [*suite.tasks], pair)
    )
    assert isinstance(tables, PlainResult)
    key = "tasks" if files else "results"
    scores = tables.record[key]
    others = None
    if pair.reference is not None:
        others = {task: each["against"] for task, each in scores.items()} if files else tables.record["against"][key]
    means, lines = {"mean": suite.mean(scores)}, [suite.describe(scores, str(pair.name))]
    if others is not None:
        means["against"] = suite.mean(others)
        lines.append(suite.describe(others, str(pair.reference_name)))
    record = tables.record | {"suite": {"name": suite.name, "metrics": dict(suite.tasks), **means}}
    return PlainResult(record, [*tables.parts, *lines])


def _note_loss(options: EvaluateOptions, result: Result) -> None:
    """Put what was measured into card and record of an output, if the reference is what it was made from."""
    out, dense, loss = Path(options.model), Path(str(options.against)), result.loss()
    if loss is None or not (out.is_dir() and os.access(out, os.W_OK)) or find_graph(options.model) is not None:
        return  # in the Hub's cache, too, nothing is changed
    if not is_source(out, dense):
        return
    # Names without folders: a card is shown to others.
    read = [Path(place).name for place in (*options.text, options.data, options.images) if place is not None]
    named = [name for name in read if not loss.data.endswith(f" of {name}")]
    loss = loss.model_copy(update={"data": ", ".join([*named, loss.data])})
    try:
        earlier = note_loss(out, loss)
        if earlier is not None and earlier.file is not None:
            Notices()(
                f"the model card of {out} keeps the figures of {earlier.file}: these are of the weights beside it"
            )
        elif earlier is not None and earlier.data != loss.data:
            now, was = (", ".join(figures_of(each)) for each in (loss, earlier))
            Notices()(f"the model card of {out} now says {now}, in place of {was} on {earlier.data}")
    except UserError as error:
        Notices()(f"the model card of {out} does not say what was measured: {error}")


def _lm_eval(options: EvaluateOptions, names: Sequence[str], pair: Pair) -> Result:
    from ckpt_prune.evaluation.harness import run_tasks, tabulate

    graph = pair.graph or pair.reference_graph
    if graph is not None:
        raise UserError(f"{graph} is a graph: it is measured with --text, --images or --tasks FILE.jsonl")
    for path in (pair.folder, pair.reference):
        if path is not None:
            check_generates(path, "image-text-to-text")

    def tables(folder: Path, load: Callable[[], PreTrainedModel]) -> dict[str, Any]:
        model = load() if pair.keeps else None
        return run_tasks(
            folder, names, device=pair.device, limit=options.samples, include_path=options.include_path, model=model
        )

    other = None if pair.reference is None else tables(pair.reference, pair.load_reference)
    return tabulate(pair.folder, tables(pair.folder, pair.load), pair.reference, other)


def _place(name: str) -> tuple[Path | None, Path]:
    """Return the graph that a model is, if it is one, and its folder."""
    graph = find_graph(name)
    folder = resolve_model(name) if graph is None else graph.parent
    refuse_adapter(folder)
    return graph, folder


def _open_graph(path: Path) -> PreTrainedModel:
    from ckpt_prune.onnx.session import open_graph

    return open_graph(path, "cpu")


def _foresee(models: Sequence[StreamedModel], windows: int, window: int) -> None:
    """Say what measuring takes, if that is long or more than there is."""
    warning = estimate_evaluation(models, windows, window).since_start().warning if models else None
    if warning is not None:
        Notices()(warning)


def _foresee_all(pair: Pair, options: EvaluateOptions, places: DeviceMap | None) -> Result:
    """Say what measuring takes, or where parts of models would go."""
    if places is not None:
        return memory_plans(pair.folders, places, default_dtype(pair.device))
    models = pair.streamed
    if not options.text or options.window is None or len(models) < len(set(pair.folders)):
        raise UserError(
            "--dry-run tells what it takes to measure causal language models on --text in windows of --window, or, "
            "with --device-map auto, where the parts of any model would go"
        )
    tokenizer = load_tokenizer(pair.folder)
    windows = sum(len(read_windows(text, tokenizer, options)) for text in options.text)
    estimate = estimate_evaluation([models[folder] for folder in pair.folders], windows, options.window).since_start()
    return PlainResult({"estimate": estimate.data()}, [f"it takes {estimate.line}"])
