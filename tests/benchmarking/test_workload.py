"""Workloads that two models can both be timed on."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from ckpt_prune.benchmarking.workload import ModelInputs, Workload, choose_workloads, read_model_inputs
from ckpt_prune.common.errors import UserError
from ckpt_prune.options.graphs import TaskName
from tests import encoders, families, refusals


def text(
    vocabulary: int = 40, context: int | None = 256, *, task: TaskName = "text-generation", cached: bool = True
) -> ModelInputs:
    return ModelInputs(task, "text", vocabulary, context, None, cached)


def encoder(task: TaskName = "feature-extraction") -> ModelInputs:
    return text(task=task, cached=False)


def image(*size: int, task: TaskName = "image-classification") -> ModelInputs:
    return ModelInputs(task, "image", None, None, size, False)


def choose(a: ModelInputs, b: ModelInputs, *, batches=(1,), tokens=None, steps=None) -> list[Workload]:
    return choose_workloads([a, b], ["dense", "pruned"], batches=batches, tokens=tokens, steps=steps)


refusal = partial(refusals.refusal, choose)


def lengths(context: int | None, **options: int) -> tuple[int, int]:
    (workload,) = choose(text(context=context and context + 50), text(context=context), **options)
    return workload.tokens, workload.steps


@pytest.mark.parametrize(
    ("context", "options", "expected"),
    [
        (256, {}, (128, 16)),
        (None, {}, (128, 16)),
        (100, {}, (84, 16)),
        (20, {}, (10, 10)),
        (1, {}, (1, 0)),
        (256, {"tokens": 250}, (250, 6)),
        (256, {"tokens": 256}, (256, 0)),
        (None, {"tokens": 1000}, (1000, 16)),
        (100, {"steps": 90}, (10, 90)),
        (100, {"steps": 0}, (100, 0)),
        (100, {"tokens": 60, "steps": 40}, (60, 40)),
    ],
)
def test_text_and_what_is_generated_fit_the_shorter_context(context, options, expected):
    assert lengths(context, **options) == expected


@pytest.mark.parametrize(
    ("options", "length", "remedy"),
    [
        ({"tokens": 257}, "257 tokens is", "use --tokens 256 or less"),
        ({"tokens": 250, "steps": 7}, "250 tokens and 7 generated after it are", "use smaller --tokens and --generate"),
        ({"steps": 256}, "1 token and 256 generated after it are", "use smaller --tokens and --generate"),
    ],
)
def test_what_does_not_fit_is_refused(options, length, remedy):
    assert refusal(text(), text(), **options) == f"a text of {length} more than the context of 256 tokens: {remedy}"


def test_inputs_come_from_the_seed_alone():
    (workload,) = choose(text(), text())
    first = workload.make_inputs()["input_ids"]
    torch.manual_seed(9)
    assert workload.make_inputs()["input_ids"].equal(first)
    pixels = [
        choice.make_inputs()["pixel_values"] for choice in choose(image(3, 4, 5), image(3, 4, 5), batches=(2,)) * 2
    ]
    assert pixels[0].shape == (2, 3, 4, 5)
    assert pixels[0].equal(pixels[1])


@pytest.mark.parametrize(
    ("inputs", "phases", "generates"),
    [
        (encoder(), ("forward",), False),
        (text(), ("prefill", "decode"), True),
        (text(cached=False), ("prefill",), True),
        (image(3, 8, 8), ("forward",), False),
    ],
)
def test_phases_follow_from_what_a_model_reads(inputs, phases, generates):
    (workload,) = choose(inputs, inputs, batches=(3,))
    assert (workload.phases, workload.generates) == (phases, generates)
    assert workload.cached == ("decode" in phases)
    assert workload.tokens == (0 if inputs.modality == "image" else 128)
    assert workload.count_items(phases[-1]) == 3 * (1 if phases[-1] == "decode" else workload.tokens or 1)


SAME_WORK = ", so they do not do the same work: give two of one task"
SAME_INPUT = ": they cannot be timed on the same input"


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (text(), image(3, 8, 8), {}, f"dense reads text and pruned reads images{SAME_INPUT}"),
        (
            image(3, 8, 8),
            image(3, 16, 8),
            {},
            f"dense reads images of 3 x 8 x 8 and pruned reads images of 3 x 16 x 8{SAME_INPUT}",
        ),
        (
            image(3, 8, 8),
            image(3, 8, 8),
            {"tokens": 5},
            "--tokens and --generate are for text, and dense reads images: leave them out",
        ),
        (encoder(), encoder(), {"steps": 4}, "--generate 4: dense generates no text with a cache; leave it out"),
        (encoder(), text(), {}, f"dense is for feature-extraction and pruned for text-generation{SAME_WORK}"),
        (
            text(cached=False),
            text(),
            {},
            "only the graph of pruned has a cache, so the two do not do the same work: export both with --cache or "
            "both with --no-cache",
        ),
    ],
)
def test_pairs_that_do_not_go_together_are_refused(a, b, options, message):
    assert refusal(a, b, **options) == message


@pytest.mark.parametrize(
    ("maker", "variant", "reads"),
    [
        (families.make, "llama", text(context=families.CONTEXT)),
        (encoders.make, "opt", text(context=encoders.CONTEXT)),
        (encoders.make, "opt-model", text(context=encoders.CONTEXT, task="feature-extraction", cached=False)),
        (encoders.make, "vit", image(3, encoders.IMAGE, encoders.IMAGE)),
    ],
)
def test_what_models_take(tmp_path, maker, variant, reads):
    assert read_model_inputs(maker(tmp_path / "model", variant)) == reads


def test_a_config_without_a_vocabulary(tmp_path):
    """A config without a vocab_size is refused if transformers does not know its type: known ones have defaults."""
    config = {"model_type": "ours", "architectures": ["OursForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        read_model_inputs(tmp_path)
    assert str(caught.value) == f"{tmp_path}: config.json has no vocab_size, so no tokens can be chosen for it"


def test_foreign_code_is_not_run(tmp_path):
    folder = families.make(tmp_path / "model", "llama")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}
    path.write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="where you have read and trust it, say --trust-remote-code"):
        read_model_inputs(folder)
