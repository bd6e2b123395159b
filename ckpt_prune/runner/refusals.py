"""Refusals before torch is imported, which takes seconds: of places, and of options that contradict others."""

from functools import partial
from pathlib import Path

from ckpt_prune.checkpoint.folder_kinds import CONVERSION_KIND, EXPORT_KIND, FRONTIER, OUTPUT_KIND, FolderKind
from ckpt_prune.checkpoint.model_folder import check_output_folder, fetch_config, holds_graphs, refuse_adapter
from ckpt_prune.checkpoint.staging import Staging, check_output, refuse_inside, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import parse_ratio, refuse_ratio
from ckpt_prune.common.similar_names import ask_for_sibling
from ckpt_prune.common.text_encoding import has_row_suffix
from ckpt_prune.datasets.glue import parse_task_name
from ckpt_prune.datasets.suites import parse_suite
from ckpt_prune.gguf import check_gguf_place
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.statistics.files import STATISTICS, check_statistics
from ckpt_prune.model.composites import (
    asked_parts,
    has_stacks,
    is_composite,
    known_composites,
    load_composite,
    text_part,
)
from ckpt_prune.model.descriptions import count_stages
from ckpt_prune.model.purposes import PURPOSES, refuse_text_of
from ckpt_prune.model.runtimes import RUNTIMES
from ckpt_prune.model.supported import check_supported, read_local_config
from ckpt_prune.options.commands import (
    CalibrateOptions,
    CompareOptions,
    ConvertOptions,
    EvaluateOptions,
    ExportOptions,
    FrontierOptions,
    InspectOptions,
    PlanOptions,
    PruneOptions,
    QuantizeOptions,
    RecoverOptions,
    SweepOptions,
    VerifyOptions,
)
from ckpt_prune.options.data import QualityOptions, SampleOptions, has_data
from ckpt_prune.options.option import flags_of
from ckpt_prune.options.training import LoraSettings, SnowsSettings
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.places import check_recipe
from ckpt_prune.recipe.sizes import asked_size
from ckpt_prune.runner.sweep_values import OF_DATA, values_of
from ckpt_prune.stages.quantize.records import QUANTISATION_KIND


def refuse_prune(options: PruneOptions) -> None:
    has_data(options)
    if options.public and options.push is None:
        raise UserError("--public goes with --push")
    if options.recipe is not None and options.plan is not None:
        raise UserError("a plan has settled its recipe: give --recipe or --plan, not both")
    size = asked_size(options.sizes, options.ratio)
    changes = (options.ratio is not None, size, options.overrides, options.container, options.runs_on)
    if options.plan is not None and any((*changes, options.pattern, options.rotate)):
        raise UserError(
            "a plan has settled ratio and recipe: --ratio, --target-*, --pattern, --rotate, --set, --for and "
            "--container do not go with it"
        )
    if options.recipe is not None:
        check_recipe(options.recipe)
    if options.has_output:
        _check_place(options.model, options.output, resume=options.resume, overwrite=options.may_replace)
    parts = asked_parts(read_local_config(options.model), options.part)
    for part in parts:
        check_supported(options.model, options.family, part)
    of_one = ("plan", "statistics", "target_params", "target_bytes", "target_flops", "target_latency")
    given = [name for name in of_one if getattr(options, name) is not None]
    if len(parts) > 1 and given:
        flag = flags_of(given[0], PruneOptions.model_fields[given[0]])[-1]
        of_all = "" if given[0] in ("plan", "statistics") else ", or give --ratio, which is of all"
        raise UserError(f"{flag} is of one part: name it with --part {' or '.join(map(str, parts))}{of_all}")
    if options.part != "all" and (options.vision_recipe is not None or options.vision_ratio is not None):
        raise UserError("--vision-recipe and --vision-ratio go with --part all")
    if "vision" not in parts and (options.vision_recipe is not None or options.vision_ratio is not None):
        raise UserError(f"--vision-recipe and --vision-ratio are for a vision tower, which {options.model} has none of")
    if options.vision_recipe is not None:
        check_recipe(options.vision_recipe)
    if options.vocabulary is not None and options.data is not None:
        raise UserError("--vocabulary chooses tokens by text: it does not go with --data; prune in two steps")
    check_texts(options.text)
    _check_quality(options, options.model)
    if options.statistics is not None:
        check_statistics(options.statistics)
    if options.push is not None:
        process_group().on_first(partial(_check_pushed, options.push, options))


def refuse_inspect(options: InspectOptions) -> None:
    asked_ratios(options.ratios)
    if options.recipe is not None:
        check_recipe(options.recipe)
    if holds_graphs(Path(options.model)):
        for name in ("ratios", "recipe", "sparsity", "part", "family"):
            if getattr(options, name):
                flag = f"--{name.removesuffix('s')}"
                raise UserError(
                    f"{options.model} holds ONNX graphs: {flag} asks for the checkpoint they were made from"
                )
        return
    for part in asked_parts(read_local_config(str(fetch_config(options.model))), options.part):
        check_supported(options.model, options.family, part)


def refuse_plan(options: PlanOptions) -> None:
    asked_size(options.sizes, options.ratio)
    if options.recipe is not None:
        check_recipe(options.recipe)
    check_supported(options.model, options.family, options.part)
    if options.statistics is not None:
        check_statistics(options.statistics)


def refuse_sweep(options: SweepOptions) -> None:
    key, _ = values_of(options)
    calibrated = bool(options.text or options.images)
    if not options.evaluate and (options.window is not None or options.evaluate_samples is not None):
        raise UserError("--window and --evaluate-samples are of what points are measured on: give --evaluate FILE")
    if calibrated and not options.evaluate:
        raise UserError(
            "--text and --images calibrate every point of a --sweep anew, to be measured: give --evaluate FILE, or "
            "plan from --statistics"
        )
    if not calibrated and (options.samples is not None or key in OF_DATA):
        name = f"--sweep {key}" if options.samples is None else "--samples"
        raise UserError(f"{name} is of --text or --images")


def refuse_calibrate(options: CalibrateOptions) -> None:
    _require_data("calibrate", options)
    check_supported(options.model, options.family, options.part)
    check_texts(options.text)
    if not options.overwrite:
        process_group().on_first(lambda: Staging(options.output, job="", kind=STATISTICS))


def refuse_stacks(command: str, model: str, others: str = " alone") -> None:
    """Refuse a model with several stacks of blocks for a command that takes no part of one."""
    config = read_local_config(model)
    if has_stacks(config):
        kind = "in stages" if count_stages(config) else "an encoder-decoder"
        raise UserError(f"{config['model_type']} is {kind}: {command} takes models with one stack of blocks{others}")


def refuse_quantize(options: QuantizeOptions) -> None:
    refuse_stacks("quantize", options.model)
    if has_data(options) and options.statistics is not None:
        raise UserError("--statistics takes the place of --text: give one of them")
    asked_size({"bytes": options.target_bytes}, None)
    of_text = options.format == "gguf"
    check_supported(options.model, None, text_part(read_local_config(options.model)) if of_text else None)
    check_texts(options.text)
    _check_quality(options, options.model)
    if options.statistics is not None:
        check_statistics(options.statistics)
    if of_text:
        check_gguf_place(options.output, overwrite=options.overwrite)
    else:
        kind = QUANTISATION_KIND
        _check_place(options.model, options.output, resume=options.resume, overwrite=options.overwrite, kind=kind)


def refuse_convert(options: ConvertOptions) -> None:
    kind = CONVERSION_KIND
    check_output(Path(options.model), options.output, resume=options.resume, overwrite=options.overwrite, kind=kind)


def refuse_frontier(options: FrontierOptions) -> None:
    asked_size({"bytes": options.target_bytes, "latency": options.target_latency}, None)
    check_texts((*options.text, *options.held_out))
    _check_place(options.model, options.output, resume=options.resume, overwrite=options.overwrite, kind=FRONTIER)


def refuse_export(options: ExportOptions) -> None:
    asked_size({"bytes": options.target_bytes}, None)
    check_texts(options.text)
    if options.format == "gguf":
        if read_local_config(options.model).get("model_type") not in RUNTIMES["llama.cpp"].encoders:
            refuse_stacks("export to a GGUF file", options.model, ", and t5, mt5 and umt5")
        check_gguf_place(options.output, overwrite=options.overwrite)
    else:
        refuse_inside(options.output, [options.labels, *options.images, *options.text])
        Staging(options.output, job="export", overwrite=options.overwrite, kind=EXPORT_KIND)


def refuse_recover(options: RecoverOptions) -> None:
    if options.data is not None and (options.method != "lora" or has_data(options)):
        other = "--text, --images and --audio take no rows with answers" if options.method == "lora" else ""
        raise UserError(f"--data is for --method lora by itself{f': {other}' if other else ''}")
    if options.method != "laco":
        if process_group().size > 1:
            raise UserError(f"--method {options.method} trains in one process: start it without torchrun")
        _check_whole(options)
    if options.method != "lora":
        for name, field in LoraSettings.model_fields.items():
            if getattr(options, name) != field.default:
                raise UserError(f"{flags_of(name, field)[-1]} is for --method lora")
    if options.method != "snows":
        for name, field in SnowsSettings.model_fields.items():
            if getattr(options, name) != field.default:
                raise UserError(f"{flags_of(name, field)[-1]} is for --method snows")
    if options.method != "lora" and options.dense is None:
        raise UserError("recover needs --dense MODEL, the model that PRUNED was made from (--method lora does not)")
    if options.dense is not None and Path(options.dense).is_dir():
        refuse_overlap(Path(options.dense), options.output)
    _check_place(options.pruned, options.output, resume=options.resume, overwrite=options.overwrite)
    if options.data is None:
        _require_data("recover", options)
    for each in filter(None, (options.pruned, options.dense)):
        check_supported(each, options.family, options.part)
    check_texts(options.text)
    _check_quality(options, options.dense or options.pruned)


def refuse_compare(options: CompareOptions) -> None:
    _require_data("compare", options)
    for each in (options.reference, options.model):
        check_supported(each, options.family, options.part)
    check_texts(options.text)
    if options.plot is not None:
        from ckpt_prune.show.html import check_page

        check_page(options.plot, options.overwrite)


def refuse_evaluate(options: EvaluateOptions) -> None:
    config = read_local_config(options.model)
    if options.text and is_composite(config) and config["model_type"] in known_composites():
        refuse_text_of(Path(options.model), PURPOSES.get(load_composite(config).auto))
    if not options.dry_run:
        _check_measured(options)
    check_texts(options.text)


def refuse_verify(options: VerifyOptions) -> None:
    if options.statistics is not None and options.against is None:
        raise UserError("--statistics needs --against MODEL: blocks are computed again from both")
    check_output_folder(Path(options.folder))


def asked_ratios(text: str | None) -> list[float]:
    """Return the ratios that `inspect` counts sizes at."""
    ratios = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        try:
            value = float(parse_ratio(part))
        except ValueError:
            raise UserError(f"--ratio {part}: expected numbers, for example 0.1,0.2,0.3") from None
        if not 0 <= value < 1:
            raise refuse_ratio(part, value)
        ratios.append(value)
    return ratios


def asked_batches(text: str) -> tuple[int, ...]:
    """Return the sizes of batches that `benchmark` times."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--batch {text}: expected whole numbers from 1, for example 1,8")
    return tuple(dict.fromkeys(int(part) for part in parts))


# ---- parts of these ----------------------------------------------------------------------------------------------


def _require_data(command: str, options: SampleOptions) -> None:
    if not has_data(options):
        models = "vision models" if command == "compare" else "a vision model"
        raise UserError(f"{command} needs --text FILE, --images DIR for {models}, or --audio DIR")


def _check_place(model: str, out: Path, *, resume: bool, overwrite: bool, kind: FolderKind = OUTPUT_KIND) -> None:
    if Path(model).is_dir():
        process_group().on_first(lambda: check_output(Path(model), out, resume=resume, overwrite=overwrite, kind=kind))


def _check_quality(options: QualityOptions, model: str) -> None:
    """Refuse what an output cannot be measured on."""
    if len(options.evaluate) > 1 and any(Path(place).is_dir() for place in options.evaluate):
        raise UserError("--evaluate takes text files, or one folder of images")
    check_texts(tuple(place for place in options.evaluate if not Path(place).is_dir()))
    if options.evaluate and options.evaluate_samples == 0:
        raise UserError("--evaluate names what to measure on, and --evaluate-samples 0 measures nothing: give one")
    if options.evaluate:
        refuse_adapter(Path(model))


def _check_pushed(repo: str, options: PruneOptions) -> None:
    from ckpt_prune.hub.repository import find_repository

    place = find_repository(repo, public=options.public)
    if not place.empty:
        raise UserError(
            f"{place.repo} is on the Hub and not empty: choose another name, or prune and then `ckpt-prune push "
            f"{options.output} {place.repo} --overwrite`"
        )


def _check_whole(options: RecoverOptions) -> None:
    """Refuse what only LaCo can do."""
    lora, snows = options.method == "lora", options.method == "snows"
    why = "scales are of linear modules, fitted to all blocks at once"
    if lora:
        why = "lora trains the pruned model by itself, in one go"
    if snows:
        why = "snows takes Newton steps on weights"
    for is_given, flag in (
        (lora and options.dense, "--dense"),
        (lora and options.part, "--part"),
        (not snows and options.perplexity_after, "--perplexity-after"),
        (snows and options.lr is not None, "--lr"),
        (snows and options.schedule != "cosine", f"--schedule {options.schedule}"),
        (options.norms, "--norms"),
        (options.teacher != "dense", f"--teacher {options.teacher}"),
    ):
        if is_given:
            raise UserError(f"{flag} is for --method laco: {why}")


def _check_measured(options: EvaluateOptions) -> None:
    sources = {
        "--text": bool(options.text),
        "--images": options.images is not None,
        "--data": options.data is not None,
        "--tasks": options.tasks is not None,
        "--generate": bool(options.generate),
    }
    given_flags = [name for name, is_given in sources.items() if is_given]
    if len(given_flags) > 1 and options.images is not None:
        raise UserError(f"{' and '.join(given_flags)}: a model reads either images or text; measure each by itself")
    if not given_flags:
        raise UserError(
            "evaluate needs --text FILE, --images DIR for a vision model, --data FILE for one that reads both, "
            "--tasks, or --generate PROMPT"
        )
    if options.text and options.window is None:
        raise UserError(
            "evaluate needs --window T: a perplexity means nothing without its window (128 and 2048 are common)"
        )
    if not (options.text or options.data) and options.window is not None:
        raise UserError(f"--window goes with --text or --data, not with {given_flags[0]}")
    if options.tasks is not None:
        _check_tasks(options)


def _check_tasks(options: EvaluateOptions) -> None:
    names = options.task_names
    files = [name for name in names if has_row_suffix(name)]
    glue = [name for name in names if parse_task_name(name) is not None]
    if not names:
        raise UserError("--tasks names no task: give .jsonl files of items, or names of lm-eval tasks")
    if any(map(parse_suite, names)):
        if len(names) > 1:
            raise UserError("--tasks: a suite is run in a call of its own")
        return
    if glue and len(glue) + len(files) < len(names):
        raise UserError("--tasks: tasks of GLUE and lm-eval's own are run in calls of their own")
    if files and not glue and len(files) < len(names):
        raise UserError("--tasks: .jsonl files and lm-eval's own tasks are run in calls of their own")
    missing = [name for name in files if not Path(name).is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file of items{ask_for_sibling(Path(missing[0]))}")
    if (files or glue) and options.include_path is not None:
        source = ".jsonl files" if files else glue[0]
        raise UserError(f"--include-path is for lm-eval tasks: it does not go with {source}")
    if not files and not glue and options.trust_remote_code:
        raise UserError("lm-eval tasks never run a checkpoint's own code: leave --trust-remote-code out")
