"""What two models can both be timed on."""

import json
from pathlib import Path

import pytest
import torch

from ckpt_prune.benchmarking.workload import Reads, Workload, choose_workloads, reads_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.graph_settings import TaskName
from tests import encoders, families


def text(
    vocabulary: int = 40, context: int | None = 256, *, task: TaskName = "text-generation", cached: bool = True
) -> Reads:
    return Reads(task, "text", vocabulary, context, None, cached)


def encoder(task: TaskName = "feature-extraction") -> Reads:
    return text(task=task, cached=False)


def image(*size: int, task: TaskName = "image-classification") -> Reads:
    return Reads(task, "image", None, None, size, False)


def choose(a: Reads, b: Reads, *, batches=(1,), tokens=None, steps=None) -> list[Workload]:
    return choose_workloads([a, b], ["dense", "pruned"], batches=batches, tokens=tokens, steps=steps)


def refusal(*args, **asked) -> str:
    with pytest.raises(UserError) as caught:
        choose(*args, **asked)
    return str(caught.value)


def lengths(context: int | None, **asked: int) -> tuple[int, int]:
    (found,) = choose(text(context=context and context + 50), text(context=context), **asked)
    return found.tokens, found.steps


@pytest.mark.parametrize(
    ("context", "asked", "found"),
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
def test_text_and_what_is_generated_fit_the_shorter_context(context, asked, found):
    assert lengths(context, **asked) == found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tokens": 257}, "a text of 257 tokens is more than the context of 256 tokens: say --tokens 256 or less"),
        (
            {"tokens": 250, "steps": 7},
            "a text of 250 tokens and 7 generated after it are more than the context of 256 tokens: say less with "
            "--tokens and --generate",
        ),
        (
            {"steps": 256},
            "a text of 1 token and 256 generated after it are more than the context of 256 tokens: say less with "
            "--tokens and --generate",
        ),
    ],
)
def test_what_does_not_fit_is_refused(asked, said):
    assert refusal(text(), text(), **asked) == said


def test_one_workload_per_batch_size_in_the_smaller_vocabulary():
    found = choose(text(vocabulary=50), text(vocabulary=7), batches=(8, 1), tokens=30, steps=0)
    assert [each.batch for each in found] == [8, 1]
    for each in found:
        inputs = each.inputs()
        assert inputs["input_ids"].shape == (each.batch, 30)
        assert int(inputs["input_ids"].max()) <= 6
        assert inputs["attention_mask"].eq(1).all()
        assert each.phases == ("prefill",)
        assert each.items("prefill") == each.batch * 30


def test_inputs_come_from_the_seed_alone():
    (workload,) = choose(text(), text())
    first = workload.inputs()["input_ids"]
    torch.manual_seed(9)
    assert workload.inputs()["input_ids"].equal(first)
    pixels = [each.inputs()["pixel_values"] for each in choose(image(3, 4, 5), image(3, 4, 5), batches=(2,)) * 2]
    assert pixels[0].shape == (2, 3, 4, 5)
    assert pixels[0].equal(pixels[1])


def test_encoders_are_read_in_one_pass():
    (found,) = choose(encoder(), encoder())
    assert (found.phases, found.steps, found.generates, found.cached) == (("forward",), 0, False, False)
    assert found.tokens == 128


def test_decode_is_of_one_token_a_text():
    (found,) = choose(text(), text(), batches=(3,))
    assert found.phases == ("prefill", "decode")
    assert found.items("decode") == 3


def test_graphs_without_a_cache_have_no_decode():
    bare = text(cached=False)
    (found,) = choose(bare, bare)
    assert (found.phases, found.tokens, found.cached) == (("prefill",), 128, False)
    assert refusal(bare, bare, steps=4) == "--generate 4: dense generates no text with a cache; leave it out"


@pytest.mark.parametrize(
    ("a", "b", "asked", "said"),
    [
        (
            text(),
            image(3, 8, 8),
            {},
            "dense reads text and pruned reads images: they cannot be timed on the same input",
        ),
        (
            image(3, 8, 8),
            image(3, 16, 8),
            {},
            "dense reads images of 3 x 8 x 8 and pruned reads images of 3 x 16 x 8: they cannot be timed on the same "
            "input",
        ),
        (
            image(3, 8, 8),
            image(3, 8, 8),
            {"tokens": 5},
            "--tokens and --generate are for text, and dense reads images: leave them out",
        ),
        (
            encoder(),
            encoder(),
            {"steps": 4},
            "--generate 4: dense generates no text with a cache; leave it out",
        ),
        (
            encoder(),
            text(),
            {},
            "dense is for feature-extraction and pruned for text-generation, so they do not do the same work: give two "
            "of one task",
        ),
        (
            encoder("fill-mask"),
            encoder("text-classification"),
            {"steps": 0},
            "dense is for fill-mask and pruned for text-classification, so they do not do the same work: give two of "
            "one task",
        ),
        (
            image(3, 8, 8),
            image(3, 8, 8, task="feature-extraction"),
            {},
            "dense is for image-classification and pruned for feature-extraction, so they do not do the same work: "
            "give two of one task",
        ),
        (
            text(cached=False),
            text(),
            {},
            "of the two graphs only that of pruned has a cache, so they do not do the same work: export both with "
            "--cache or both with --no-cache",
        ),
    ],
)
def test_pairs_that_do_not_go_together(a, b, asked, said):
    assert refusal(a, b, **asked) == said


def test_no_decode_is_right_for_images():
    (found,) = choose(image(3, 8, 8), image(3, 8, 8), steps=0)
    assert found.phases == ("forward",)
    assert found.items("forward") == 1


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
    assert reads_of(maker(tmp_path / "model", variant), None) == reads


def test_a_config_without_a_vocabulary(tmp_path):
    """Of a type that transformers does not know: its own would have a default."""
    config = {"model_type": "ours", "architectures": ["OursForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        reads_of(tmp_path, None)
    assert str(caught.value) == f"{tmp_path}: config.json has no vocab_size, so no tokens can be chosen for it"


def test_foreign_code_is_not_run(tmp_path):
    folder = families.make(tmp_path / "model", "llama")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}
    path.write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="where you have read and trust it, say --trust-remote-code"):
        reads_of(folder, None)
