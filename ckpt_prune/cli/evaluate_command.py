"""`ckpt-prune evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.evaluate import evaluate
from ckpt_prune.checkpoint.model_folder import find_graph
from ckpt_prune.cli.options import (
    checked_model,
    device_option,
    echo_json,
    json_option,
    options_of,
    table,
    trust_option,
)
from ckpt_prune.common.safe_text import to_one_line
from ckpt_prune.options import EvaluationOptions, SpreadOptions

if TYPE_CHECKING:
    from ckpt_prune.evaluation.results import Result

NAMED = 10
"""So many images that do not decode are named in text; JSON names all."""


def _checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse what is neither a graph nor can be a checkpoint."""
    return value if value is not None and find_graph(value) else checked_model(context, parameter, value)


@click.command("evaluate")
@click.argument("model", callback=_checked)
@options_of(EvaluationOptions)
@click.option(
    "--against",
    metavar="MODEL2",
    callback=_checked,
    help="A reference (the dense model): both side by side, with KL divergence.",
)
@click.option(
    "--probe",
    type=click.Choice(["knn", "linear"]),
    help="With --images: what the features, without a head, tell of the classes: by 20 nearest neighbours, or by ridge "
    "regression.",
)
@click.option(
    "--patch-head",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --images: a linear head on every patch (safetensors: weight, perhaps bias and a batch norm, bn.*), held "
    "against --label-maps: classes (segmentation), or one number (depth).",
)
@click.option(
    "--label-maps",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="For --patch-head: a PNG for each image, of its size and stem; 255 is no class, of depth 0 no number.",
)
@click.option(
    "--tasks",
    multiple=True,
    metavar="T[,T...]",
    help="Files of multiple-choice items (.jsonl), or names of lm-eval tasks (needs the eval extra); "
    "of a model with a sequence-classification head files of labelled texts, or tasks of GLUE: glue:sst2, "
    "FOLDER/glue:mrpc. May be repeated.",
)
@click.option(
    "--include-path", type=click.Path(path_type=Path), help="Folder with lm-eval task files of your own, for --tasks."
)
@click.option(
    "--generate",
    multiple=True,
    metavar="PROMPT",
    help="Show what the model says after PROMPT, greedily; may be repeated.",
)
@click.option(
    "--generate-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens to generate after each prompt, at most.",
)
@options_of(SpreadOptions)
@click.option(
    "--dry-run",
    is_flag=True,
    help="With --device-map: say where the parts of the models would go, from their configs alone, and load nothing.",
)
@trust_option
@device_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Measure MODEL: perplexity on text in windows of T tokens, accuracy on images, tasks, or show what it says.

    Perplexity: non-overlapping windows, the tail dropped, the first token of each window unscored, exp of the mean.
    Two protocols are in use, windows of 128 and of 2048 tokens, and differ by a factor of two on the same model: the
    window is printed with every figure. KL is the mean over scored tokens of KL(MODEL2 || MODEL), in nats.

    --samples N scores the first N windows of the text, not N at random as calibrate takes them: how hard a text is
    differs along it, so hold such a figure only against others of the same text, window and N.

    MODEL and MODEL2 may be ONNX graphs, this tool's or another's, beside their config and tokenizer or image processor
    (OUT/onnx/model_q4.onnx), or a folder with one graph; onnxruntime runs them on the CPU.

    Images: top-1 and top-5 of an image classifier, and with --against how often both put the same class first and the
    mean KL over images. Preprocessing is the checkpoint's own (preprocessor_config.json), by Pillow. --samples takes
    images at random (seed 0): the first ones would be those of the first classes.

    --probe asks what the features of a base model tell of classes: on images that labels.csv marks calib it learns, on
    those marked eval it is tested; without marks on one half each.

    --patch-head is given what the last block makes of every patch, behind its norm, as DINOv2's linear segmentation
    heads are. Its answers are drawn out between patches to the size that the model sees (bilinear), and the label maps
    are resized and cropped as the images are (nearest): mean intersection over union and pixel accuracy, or root mean
    squared error.

    A masked language model (BERT) is asked for 15 % of the tokens of every window, masked. A classifier of texts or
    tokens, and one that finds answers, is held against MODEL2: KL divergence, and how often both put the same first; a
    reranker or reward model by the order of its numbers. A base model without a head is compared by the cosine of its
    features with those of MODEL2. A sentence-transformers folder, of an encoder or a decoder, is compared by its
    embeddings of every line of the text that is not empty, cut to T tokens: their cosine, the rank correlation of the
    cosines of all pairs of lines, and how often both find the same line nearest to another.

    Items of a .jsonl are answered by the likeliest continuation, as EleutherAI's harness does it: accuracy by plain
    log-probability, norm. by that per character, beside the chance of guessing. They have the shape of ARC, OpenBookQA,
    PIQA, WinoGrande or BoolQ, or question, choices (a list) and answer (from 0).

    A model with a sequence-classification head labels texts: tasks of GLUE (glue:cola, sst2, mrpc, qqp, stsb, mnli,
    mnli-mm, qnli, rte, wnli; their validation splits, from FOLDER, $CKPT_PRUNE_DATA/glue or the Hub), or rows of a
    .jsonl with label and the columns of one of these. Metrics are GLUE's: Matthews' correlation for CoLA, accuracy and
    F1 for MRPC and QQP, Pearson's and Spearman's correlation for STS-B, accuracy elsewhere.

    --generate shows what a perplexity hides: a model that repeats itself has a plausible one. Repeated is the share of
    runs of four tokens that were there before.

    --text, --tasks and --generate may be given together: each model is then loaded once, --samples goes for text and
    tasks, and --json has an object for each of them.

    This loads the whole model, and both with --against. --device-map auto spreads it over GPUs, memory and disk.

    \b
      ckpt-prune evaluate OUT --against MODEL --text wiki.test.raw --window 2048
      ckpt-prune evaluate OUT --against MODEL --images photos --labels labels.csv
      ckpt-prune evaluate OUT --against MODEL --images photos --probe knn
      ckpt-prune evaluate OUT --against MODEL --images photos --patch-head seg.safetensors --label-maps maps
      ckpt-prune evaluate OUT --against MODEL --tasks arc_easy.jsonl,piqa.jsonl
      ckpt-prune evaluate OUT --against MODEL --tasks glue:sst2
      ckpt-prune evaluate OUT --against MODEL --generate "The capital of France is"
      ckpt-prune evaluate OUT --tasks arc_easy,piqa
    """
    found = evaluate(**given)
    if as_json:
        echo_json(found.data())
    else:
        _show(found)


def _show(found: "Result") -> None:
    """Print a result as people read it."""
    from ckpt_prune.evaluation.memory_plan import MemoryPlans
    from ckpt_prune.evaluation.results import (
        AccuracyResult,
        ChoiceResult,
        CombinedResult,
        FeaturesResult,
        GenerationResult,
        HeadResult,
        LabelResult,
        MaskedResult,
        PatchHeadResult,
        PerplexityResult,
        ProbeResult,
        SentencesResult,
        TaskResult,
    )

    if isinstance(found, CombinedResult):
        for number, result in enumerate(found.results.values()):
            if number:
                click.echo()
            _show(result)
        return
    shown = {
        PerplexityResult: _perplexity,
        MaskedResult: _masked,
        AccuracyResult: _accuracy,
        FeaturesResult: _features,
        SentencesResult: _sentences,
        HeadResult: _head,
        ProbeResult: _probe,
        PatchHeadResult: _patches,
        TaskResult: _tasks,
        ChoiceResult: _choices,
        LabelResult: _labels,
        GenerationResult: _generated,
        MemoryPlans: _planned,
    }
    shown[type(found)](found)


def _planned(found: Any) -> None:
    from ckpt_prune.evaluation.memory_plan import name_of

    for plan in found.plans:
        click.echo(f"{plan.folder}, {plan.dtype}:")
        click.echo(table(["device", "parts", "bytes", "room"], plan.rows()))
        left = [name_of(each.device) for each in plan.devices if each.device == "disk"]
        if left:
            click.echo("what is left on disk is read again for every batch")


def _both(found: Any) -> list[tuple[Path, Any]]:
    """The model and its score, and those of the reference where there is one."""
    pairs = [(found.model, found.score)]
    return pairs if found.against is None else [*pairs, (found.against, found.reference)]


def _perplexity(found: Any) -> None:
    rows = [[str(path), f"{s.perplexity:.3f}", str(s.window), f"{s.tokens:,}"] for path, s in _both(found)]
    click.echo(table(["model", "perplexity", "window", "tokens"], rows))
    if found.against is not None:
        click.echo(f"\nKL divergence {found.kl:.4f} nats per token, top-1 agreement {found.agreement:.1%}")


def _masked(found: Any) -> None:
    from ckpt_prune.evaluation.masked import SHARE

    rows = [
        [str(path), f"{s.perplexity:.3f}", f"{s.accuracy:.2%}", str(s.window), f"{s.tokens:,}"]
        for path, s in _both(found)
    ]
    click.echo(table(["model", "masked perplexity", "accuracy", "window", "masked"], rows))
    click.echo(f"\n{SHARE:.0%} of the tokens masked: not comparable with a causal perplexity")
    if found.against is not None:
        click.echo(f"KL divergence {found.kl:.4f} nats per token, top-1 agreement {found.agreement:.1%}")


def _accuracy(found: Any) -> None:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.2%}"

    rows = [[str(path), share(s.top1), share(s.top5), f"{s.images:,}"] for path, s in _both(found)]
    click.echo(table(["model", "top-1", "top-5", "images"], rows))
    if found.against is not None:
        click.echo(f"\nKL divergence {found.kl:.4f} nats per image, top-1 agreement {found.agreement:.1%}")
    _skipped(found.skipped)


def _features(found: Any) -> None:
    figures = found.found
    row = [str(found.model), f"{figures.cosine:.4f}", f"{figures.relative_error:.4f}", f"{figures.tokens:,}"]
    click.echo(table(["features of", "cosine", "relative error", "tokens"], [row]))
    click.echo(f"\nlast hidden states against those of {found.against}")
    _skipped(found.skipped or ())


def _probe(found: Any) -> None:
    rows = [
        [str(path), f"{s.top1:.2%}", "-" if s.strength is None else f"{s.strength:g}", f"{s.features:,}"]
        for path, s in _both(found)
    ]
    click.echo(table([f"{found.kind} probe of", "top-1", "strength", "features"], rows))
    click.echo(f"\n{found.train:,} images to learn from, {found.test:,} to test on; {found.split}")
    if found.against is not None:
        click.echo(f"difference {found.score.top1 - found.reference.top1:+.2%}, same class {found.agreement:.1%}")


def _patches(found: Any) -> None:
    from ckpt_prune.evaluation.patch_heads import Depth

    depth = isinstance(found.score, Depth)
    rows = [
        [str(path), *([f"{s.rmse:.4g}"] if depth else [f"{s.miou:.2%}", f"{s.accuracy:.2%}"]), f"{s.pixels:,}"]
        for path, s in _both(found)
    ]
    click.echo(table([f"{found.head} on", *(["RMSE"] if depth else ["mIoU", "pixel accuracy"]), "pixels"], rows))
    click.echo(f"\n{found.images:,} images, compared at {found.size[0]} x {found.size[1]} pixels")
    if found.against is not None and depth:
        click.echo(f"difference {found.score.rmse - found.reference.rmse:+.4g}")
    elif found.against is not None:
        difference = found.score.miou - found.reference.miou
        click.echo(f"difference {difference:+.2%} of mIoU, same class in {found.agreement:.1%} of the pixels")
    _skipped(found.skipped)


def _head(found: Any) -> None:
    own = found.found
    if own.rank_correlation is None:
        names, figures = ["KL divergence", "agreement"], [f"{own.kl:.4f}", f"{own.agreement:.1%}"]
    else:
        names, figures = ["rank correlation"], [f"{own.rank_correlation:.4f}"]
    row = [str(found.model), *figures, str(own.window), f"{own.predictions:,}"]
    click.echo(table(["predictions of", *names, "window", "predictions"], [row]))
    click.echo(f"\nagainst those of {found.against}; nothing here says which are right")


def _sentences(found: Any) -> None:
    own = found.found
    row = [str(found.model), f"{own.cosine:.4f}", f"{own.rank_correlation:.4f}", f"{own.nearest:.1%}", f"{own.texts:,}"]
    click.echo(table(["embeddings of", "cosine", "rank correlation", "same nearest", "texts"], [row]))
    click.echo(f"\nagainst those of {found.against}; ranks of the cosines of {own.pairs:,} pairs")


def _skipped(skipped: tuple[str, ...]) -> None:
    if skipped:
        more = f" and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
        click.echo(to_one_line(f"left out, {len(skipped)} not decoding: {', '.join(skipped[:NAMED])}{more}"), err=True)


def _tasks(found: Any) -> None:
    if found.against is None:
        rows = [[task, metric, f"{value:.4f}"] for task, metric, value, _ in found.figures()]
        click.echo(table(["task", "metric", "value"], rows))
        return
    rows = [
        [task, metric, f"{value:.4f}", *(["-", "-"] if other is None else [f"{other:.4f}", f"{value - other:+.4f}"])]
        for task, metric, value, other in found.figures()
    ]
    click.echo(table(["task", "metric", str(found.model), str(found.against), "difference"], rows))


def _choices(found: Any) -> None:
    rows = []
    for task, score in found.scores.items():
        for path, own in [(found.model, score), *([(found.against, found.references[task])] if found.against else [])]:
            figures = [own.accuracy, own.stderr, own.accuracy_norm, own.chance]
            rows.append([task, str(path), *(f"{figure:.1%}" for figure in figures), f"{own.items:,}"])
    click.echo(table(["task", "model", "accuracy", "+/-", "norm.", "chance", "items"], rows))
    if found.against is not None:
        said = []
        for task, score in found.scores.items():
            difference, error = score.difference(found.references[task])
            said.append([task, f"{difference:+.1%}", f"{error:.1%}", f"{found.agreement(task):.1%}"])
        click.echo(f"\n{table(['task', 'difference', '+/-', 'both choose the same'], said)}")


def _labels(found: Any) -> None:
    rows = []
    for task, score in found.scores.items():
        for metric, value in score.figures.items():
            other = None if found.references is None else found.references[task].figures[metric]
            beside = [] if other is None else [f"{other:.4f}", f"{value - other:+.4f}"]
            rows.append([task, metric, f"{value:.4f}", *beside, f"{score.items:,}"])
    against = [] if found.against is None else [str(found.against), "difference"]
    click.echo(table(["task", "metric", str(found.model), *against, "texts"], rows))
    if found.alike is not None:
        click.echo()
    for task, alike in (found.alike or {}).items():
        if alike.kl is None:
            click.echo(f"{task}: rank correlation of the two models' numbers {alike.rank_correlation:.4f}")
        else:
            click.echo(f"{task}: both put the same class first for {alike.agreement:.1%}, KL {alike.kl:.6f}")
    for task, score in found.scores.items():
        if score.by_name is False:
            click.echo(f"{task}: the model does not name its classes as the task does; they are taken by number")


def _generated(found: Any) -> None:
    for number, prompt in enumerate(found.prompts):
        said = [(found.model, found.said[number])]
        if found.against is not None:
            said.append((found.against, found.reference[number]))
        click.echo(f"{'' if number == 0 else chr(10)}{prompt!r}")
        for path, own in said:
            click.echo(f"\n{path} ({own.tokens} tokens, {own.repeated:.0%} repeated):\n{_printable(own.text)}")


def _printable(text: str) -> str:
    """A model may say what a terminal would obey."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
