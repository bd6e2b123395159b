"""`ckpt-prune evaluate`."""

from pathlib import Path
from typing import Any

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
from ckpt_prune.options import EvaluationOptions, SpreadOptions


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
        click.echo("\n\n".join(part if isinstance(part, str) else table(*part) for part in found.paragraphs()))
