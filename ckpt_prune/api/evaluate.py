"""`ckpt_prune.evaluate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_prune.api.types import AnyModel, AnyPath, Bos, Texts
from ckpt_prune.checkpoint.model_folder import find_graph
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import show_progress
from ckpt_prune.common.text_encoding import has_row_suffix
from ckpt_prune.datasets.glue import parse_task_name
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options import EvaluateOptions, SpreadOptions, checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ckpt_prune.evaluation.pair import Pair
    from ckpt_prune.evaluation.results import OneResult, Result, TaskResult


def evaluate(
    model: AnyModel,
    *,
    text: Texts = (),
    window: int | None = None,
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    max_corrupt: float = 0.05,
    samples: int | None = None,
    bos: Bos = "auto",
    against: AnyModel | None = None,
    probe: Literal["knn", "linear"] | None = None,
    patch_head: AnyPath | None = None,
    label_maps: AnyPath | None = None,
    tasks: str | Sequence[AnyPath] = (),
    include_path: AnyPath | None = None,
    generate: str | Sequence[str] = (),
    generate_tokens: int = 64,
    dry_run: bool = False,
    device_map: Literal["auto"] | None = None,
    max_memory: str | Sequence[str] = (),
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> "Result":
    """Measure a model, as `ckpt-prune evaluate` does. The whole model is loaded, and both with `against`.

    Args:
        model: a folder, a Hub id, or what a function of this package has written; or an ONNX graph beside its config
            and tokenizer or image processor, or a folder with one.
        text: files to measure perplexity on; masked tokens of a masked language model, features of a base model,
            predictions of another head, embeddings of its lines by a sentence-transformers folder.
        window: tokens per window, or of a line at most; needed with text.
        images: folder of images for an image classifier, or for a base model of images.
        labels: CSV with columns file and label.
        max_corrupt: share of the images that may fail to decode.
        samples: windows from the start of the text, images (at random, seed 0) or a task's first items; None for all.
        bos: begin-of-sequence token before the text.
        against: a reference, usually the dense model.
        probe: with images, what the model's features without its head tell of their classes.
        patch_head: with images and `label_maps`, a safetensors file with a linear head on every patch.
        label_maps: folder with a PNG for each image: a class for every pixel, or a number where the head gives one.
        tasks: files of multiple-choice items (.jsonl), or names of lm-eval tasks; of a model with a
            sequence-classification head files of labelled texts (.jsonl), or tasks of GLUE (glue:mrpc).
        include_path: folder with lm-eval task files of one's own.
        generate: prompts that are continued greedily.
        generate_tokens: after each prompt, at most.
        dry_run: load nothing, and say where the parts of the models would go; with `device_map`.
        device_map: "auto": accelerate puts the parts of models where there is room; None for one device.
        max_memory: most that a device takes of them, "cpu=24GiB" or "0=70GiB".
        trust_remote_code: run code that a folder brings.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Returns:
        One of `ckpt_prune.evaluation.results`: of text a `PerplexityResult`, `MaskedResult` or `ComparisonResult`, of
        images an `AccuracyResult`, `ComparisonResult`, `ProbeResult` or `PatchHeadResult`, of tasks a `ChoiceResult`,
        `LabelResult` or `TaskResult`, of prompts a `GenerationResult`. If text, tasks and prompts are given together, a
        `CombinedResult` of these; each model is then loaded once.

    Raises:
        UserError: options that do not go together, a model that does not load, or two that cannot be compared.
    """
    given = locals()
    options, spreading = checked(EvaluateOptions, given), checked(SpreadOptions, given)
    if not options.dry_run:
        _check(options)
    check_texts(options.text)

    from ckpt_prune.evaluation.answers import measure_choices, measure_generation
    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.evaluation.images import measure_images, measure_patches, measure_probe
    from ckpt_prune.evaluation.label_tasks import is_labelled, measure_labelled
    from ckpt_prune.evaluation.memory_plan import memory_plans
    from ckpt_prune.evaluation.pair import Pair
    from ckpt_prune.evaluation.results import CombinedResult
    from ckpt_prune.evaluation.texts import measure_text
    from ckpt_prune.evaluation.whole_model import default_dtype
    from ckpt_prune.parallel.devices import resolve_device

    with show_progress(progress), spread(spreading) as places:
        target = resolve_device(options.device)
        graph, folder = _place(options.model)
        if options.dry_run:
            if places is None:
                raise UserError("--dry-run tells where the parts of a model would go: it goes with --device-map auto")
            both = [folder] if options.against is None else [folder, _place(options.against)[1]]
            return memory_plans(both, places, default_dtype(target))
        names = _names(options.tasks)
        other, reference = (None, None) if options.against is None else _place(options.against)
        labelled = any(map(parse_task_name, names)) or (_are_files(names) and is_labelled(folder))
        if options.generate and (graph or other) is not None:
            raise UserError(f"{graph or other} is a graph: --generate is for checkpoints; validate lets both continue")
        measures = [bool(options.text), bool(names), bool(options.generate)]
        pair = Pair(
            folder,
            reference,
            target,
            options.trust_remote_code,
            graph,
            other,
            _open_graph,
            keeps=sum(measures) > 1,
        )
        results: dict[str, OneResult] = {}
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
            results["text"] = measure_text(pair, options)
        if len(results) > 1:
            return CombinedResult({name: results[name] for name in ("text", "tasks", "generate") if name in results})
        if results:
            return next(iter(results.values()))
        if options.probe is not None:
            return measure_probe(pair, options, options.probe)
        if options.patch_head is not None and options.label_maps is not None:
            return measure_patches(pair, options, options.patch_head, options.label_maps)
        return measure_images(pair, options)


def _lm_eval(options: EvaluateOptions, names: Sequence[str], pair: "Pair") -> "TaskResult":
    from ckpt_prune.evaluation.harness import run_tasks
    from ckpt_prune.evaluation.purpose import check_generates
    from ckpt_prune.evaluation.results import TaskResult

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
    return TaskResult(pair.folder, tables(pair.folder, pair.load), pair.reference, other)


def _place(name: str) -> tuple[Path | None, Path]:
    """The graph that a model is, if it is one, and its folder."""
    from ckpt_prune.checkpoint.model_folder import resolve_model

    graph = find_graph(name)
    return graph, resolve_model(name) if graph is None else graph.parent


def _open_graph(path: Path) -> "PreTrainedModel":
    from ckpt_prune.onnx.opening import open_graph

    return open_graph(path, "cpu")


def _names(tasks: str | None) -> list[str]:
    return [name.strip() for name in (tasks or "").split(",") if name.strip()]


def _are_files(names: Sequence[str]) -> bool:
    """Whether tasks are files, in place of names that lm-eval knows."""
    return all(map(has_row_suffix, names))


def _check(options: EvaluateOptions) -> None:
    """What does not go together, told before anything is loaded."""
    given = {
        "--text": bool(options.text),
        "--images": options.images is not None,
        "--tasks": options.tasks is not None,
        "--generate": bool(options.generate),
    }
    asked = [name for name, there in given.items() if there]
    if options.tasks is None and options.include_path is not None:
        raise UserError("--include-path goes with --tasks")
    if options.images is None and options.labels is not None:
        raise UserError("--labels goes with --images")
    if options.images is None and options.probe is not None:
        raise UserError("--probe goes with --images")
    if options.images is None and options.patch_head is not None:
        raise UserError("--patch-head goes with --images")
    if (options.patch_head is None) != (options.label_maps is None):
        raise UserError("--patch-head and --label-maps go together")
    if options.patch_head is not None and options.probe is not None:
        raise UserError("--probe and --patch-head: each is measured in a call of its own")
    if len(asked) > 1 and options.images is not None:
        raise UserError(f"{' and '.join(asked)}: a model reads either images or text; measure each by itself")
    if not asked:
        raise UserError("evaluate needs --text FILE, --images DIR for a vision model, --tasks, or --generate PROMPT")
    if options.text and options.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
    if not options.text and options.window is not None:
        raise UserError(f"--window goes with --text, not with {asked[0]}")
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
