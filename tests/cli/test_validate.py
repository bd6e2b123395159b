"""`ckpt-prune validate` on graphs that are right and on graphs that are wrong, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import Result

from ckpt_prune.common.errors import UserError
from ckpt_prune.onnx.samples import choose_proof_samples
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.options.data import ProofOptions
from tests.cli.running import ok, read_json, read_refusal, run
from tests.encoders import IMAGE
from tests.evaluation.tiny import tiny_tokenizer
from tests.graphs import exports
from tests.images import write_csv, write_image

DECODER, ENCODER, VISION = "llama-gqa-tied", "bert-mlm", "deit-teacher"
HEADERS = ["onnxruntime - PyTorch", "max abs", "mean abs", "max rel", "mean rel", "top-1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    export = exports(tmp_path_factory)
    return {DECODER: export(DECODER), ENCODER: export(ENCODER, embedded=0), VISION: export(VISION)}


@pytest.fixture
def place(made: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model and its graph of each kind: decoder, encoder, vision and `NAME-onnx`; text.txt."""
    for name, variant in (("decoder", DECODER), ("encoder", ENCODER), ("vision", VISION)):
        model, graph = made[variant]
        shutil.copytree(model, tmp_path / name)
        shutil.copytree(graph, tmp_path / f"{name}-onnx")
    (tmp_path / "text.txt").write_text("the cat sat on a mat and then the dog ran far away " * 10)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_without_figures(result: Result) -> list[str]:
    """The lines printed, small numbers as ~ and columns one blank apart."""
    return [re.sub(r"\d\.\de[-+]\d\d", "~", " ".join(line.split())) for line in result.stdout.splitlines()]


def test_a_decoders_table(place: Path) -> None:
    result = run("validate", "decoder-onnx", "--against", "decoder", "--text", "text.txt", "--samples", "4")
    assert result.exit_code == 0, result.output
    assert re.split(r" {2,}", result.stdout.splitlines()[0]) == HEADERS
    lines = lines_without_figures(result)
    assert lines[1] == "logits: 1 x 1 token ~ ~ ~ ~ 100.00% ok"
    assert "logits: 3 x 24 tokens, padded left, cached in chunks ~ ~ ~ ~ 100.00% ok" in lines
    assert lines[13] == "logits: 2 x 16 tokens, padded left, generated ~ ~ ~ ~ 100.00% ok"
    perplexity, *ending = lines[14:]
    match = re.fullmatch(
        r"perplexity (\d+\.\d{3}) in onnxruntime, (\d+\.\d{3}) in PyTorch \(4 windows of 32 tokens\)", perplexity
    )
    assert match
    assert match[1] == match[2]
    assert ending == [
        "compared on: text.txt",
        "the graph agrees with decoder (fp32, cpu, tolerance 0.0001 of the largest output)",
    ]
    assert result.stderr == ""
    # `evaluate` finds the same figure on the same windows.
    measured = ok("evaluate", "decoder", "--text", "text.txt", "--window", "32", "--samples", "4")
    assert measured.splitlines()[1].split()[1] == match[1]
    record = read_json("decoder-onnx/validation.json")
    assert record["passed"] is True
    (record,) = record["graphs"]
    assert record["data"] == {"what": "text.txt", "files": ["text.txt"], "samples": 4, "window": 32, "seed": 0}
    assert record["against"]["name"] == "decoder"


def test_other_data_than_last_time_is_told(place: Path) -> None:
    """The figures of an export on a text, and of a check afterwards without it, are of two texts."""
    warning = (
        "decoder-onnx was last compared on text.txt, which is not given: these figures are of other data, and do not "
        "compare with those\n"
    )
    job = ("validate", "decoder-onnx", "--against", "decoder")
    assert run(*job, "--text", "text.txt", "--samples", "4").stderr == ""
    assert run(*job).stderr == warning
    assert run(*job).stderr == ""
    (place / "decoder-onnx/validation.json").write_text("{")
    assert run(*job).stderr == ""


def test_without_data_text_is_pythons_and_images_are_noise(place: Path) -> None:
    lines = ok("validate", "encoder-onnx", "--against", "encoder").splitlines()
    assert re.fullmatch(
        r"compared on: \d+ Python sources? of this machine's standard library, no --text being given", lines[-2]
    )
    assert lines[-3] == "metric: its tokenizer has no mask token, so nothing can be masked"
    lines = ok("validate", "vision-onnx", "--against", "vision").splitlines()
    assert lines[-3:-1] == [
        "metric: not measured on noise: give --images",
        "compared on: normal noise for pixels, no --images being given",
    ]
    assert lines[1].startswith("logits: 1 image ")
    assert lines[4].startswith("logits: 2 images ")


def test_a_folder_without_a_tokenizer_is_compared_on_noise(place: Path) -> None:
    record = read_json("decoder-onnx/ckpt_prune_onnx.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("decoder-onnx", name).unlink()
        del record["files"][name]
    Path("decoder-onnx/ckpt_prune_onnx.json").write_text(json.dumps(record))
    lines = ok("validate", "decoder-onnx", "--against", "decoder").splitlines()
    assert lines[-3] == "metric: not measured on noise: give --text"
    assert lines[-2].startswith("compared on: random tokens (decoder-onnx: no tokenizer (tokenizer.json, ")
    assert read_refusal("validate", "decoder-onnx", "--against", "decoder", "--text", "text.txt").startswith(
        "decoder-onnx: no tokenizer"
    )


def test_a_tokenizer_of_another_model_is_no_use(place: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(30)])
    tokenizer.add_tokens(["cat"])
    large = tokenizer.convert_tokens_to_ids("cat")
    assert large > 40
    tokenizer.save_pretrained("encoder-onnx")
    message = read_refusal("validate", "encoder-onnx", "--against", "encoder", "--text", "text.txt")
    assert (
        message == f"token id {large} is outside the model's vocabulary of 40; the tokenizer belongs to another model"
    )


def test_images_with_classes_give_top_1(place: Path) -> None:
    for index in range(6):
        write_image(Path("photos") / f"{index}.png", index, size=(IMAGE + 4, IMAGE))
    lines = ok("validate", "vision-onnx", "--against", "vision", "--images", "photos").splitlines()
    assert lines[-3:] == [
        "agreement 100.00% (6 images)",
        "compared on: photos",
        "the graph agrees with vision (fp32, cpu, tolerance 0.0001 of the largest output)",
    ]
    write_csv(Path("labels.csv"), "file,label", *(f"photos/{index}.png,{index}" for index in range(6)))
    options = ["--images", "photos", "--labels", "labels.csv", "--samples", "4"]
    lines = ok("validate", "vision-onnx", "--against", "vision", *options).splitlines()
    match = re.fullmatch(r"top-1 ([\d.]+%) in onnxruntime, ([\d.]+%) in PyTorch \(4 images\)", lines[-3])
    assert match
    assert match[1] == match[2]


def test_images_are_of_the_split_that_is_asked_for(place: Path) -> None:
    for index in range(3):
        write_image(Path("photos") / f"{index}.png", index, size=(IMAGE + 4, IMAGE))
    write_csv(Path("photos/labels.csv"), "file,label,split", "0.png,0,calib", "2.png,1,calib")
    task, options = GraphTask("image-classification", "image", cached=False), ProofOptions(images=(Path("photos"),))
    samples = choose_proof_samples(Path("vision"), task, options, split="calib")
    assert samples.images is not None
    assert len(samples.images) == 2
    with pytest.raises(UserError, match="no row of split eval; its splits are calib"):
        choose_proof_samples(Path("vision"), task, options)
    assert "no row of split eval" in read_refusal(
        "validate", "vision-onnx", "--against", "vision", "--images", "photos"
    )


def test_a_model_of_a_type_of_its_own_is_read_where_it_is_trusted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place / "modules"))
    Path("decoder/configuration_ours.py").write_text(
        "from transformers import PreTrainedConfig\n\n\n"
        "class Ours(PreTrainedConfig):\n"
        '    model_type = "nobody-else-has-it"\n'
        "    max_position_embeddings: int = 12\n"
        "    vocab_size: int = 40\n"
    )
    Path("decoder/config.json").write_text(
        json.dumps({"model_type": "nobody-else-has-it", "auto_map": {"AutoConfig": "configuration_ours.Ours"}})
    )
    task = GraphTask("text-generation", "text", cached=True)
    options = ProofOptions(text=(Path("text.txt"),))
    windows = choose_proof_samples(Path("decoder"), task, options, trust=True).windows
    assert windows is not None
    assert windows.shape[1] == 12  # the context that its own class says
    with pytest.raises(UserError, match="say --trust-remote-code"):
        choose_proof_samples(Path("decoder"), task, options)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "decoder --against decoder",
            "decoder is a checkpoint, with no graph beside it: --runtime transformers, vllm or mlx runs it",
        ),
        ("decoder-onnx --against encoder", "decoder-onnx was not made from encoder: its record names llama-gqa-tied"),
        (
            "vision-onnx --against vision --text text.txt",
            "vision-onnx reads images: --text and --window do not go with it; give --images DIR",
        ),
        (
            "decoder-onnx --against decoder --images .",
            "decoder-onnx reads text: --images does not go with it; give --text FILE",
        ),
        ("vision-onnx --against vision --labels vision-onnx/config.json", "--labels goes with --images"),
        (
            "decoder --runtime transformers --dense decoder",
            "--dense goes with onnxruntime and llama.cpp: --against MODEL compares with one model",
        ),
        (
            "decoder-onnx --against decoder --text text.txt --window 33",
            "--window 33 is longer than the model's context of 32 tokens: give at most that",
        ),
        (
            "vision-onnx",
            "vision-onnx neither lies in nor beside deit-teacher, which it was made from: give --against MODEL",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(place: Path, args: str, message: str) -> None:
    assert read_refusal("validate", *args.split()) == message


def test_a_damaged_record_is_refused(place: Path) -> None:
    Path("decoder-onnx/ckpt_prune_onnx.json").write_text("{}")
    assert read_refusal("validate", "decoder-onnx", "--against", "decoder") == (
        "decoder-onnx/ckpt_prune_onnx.json is damaged: export again"
    )


def test_a_graph_knows_the_model_that_it_lies_in_or_beside(place: Path) -> None:
    shutil.copytree("vision-onnx", "vision/onnx")
    assert last_line("vision/onnx").startswith("the graph agrees with vision (fp32, cpu,")
    Path("vision").rename("deit-teacher")  # as the record calls it
    assert last_line("vision-onnx").startswith("the graph agrees with deit-teacher (fp32, cpu,")
    config = read_json("deit-teacher/config.json")
    Path("deit-teacher/config.json").write_text(json.dumps(config | {"layer_norm_eps": 0.5}))
    assert "neither lies in nor beside deit-teacher" in read_refusal("validate", "deit-teacher/onnx")


def test_a_graph_stands_for_its_folder(place: Path) -> None:
    Path("alone").mkdir()
    shutil.copy("decoder-onnx/model.onnx", "alone/model.onnx")
    by_folder, by_graph = (
        ok("validate", name, "--against", "decoder", "--text", "text.txt")
        for name in ("decoder-onnx", "decoder-onnx/model.onnx")
    )
    assert by_graph == by_folder
    assert read_refusal("validate", "alone/model.onnx", "--against", "decoder") == (
        "alone has no ckpt_prune_onnx.json: it was not written by `ckpt-prune export`"
    )


def last_line(*args: str) -> str:
    return ok("validate", *args).splitlines()[-1]
