"""genai_config.json, and onnxruntime-genai itself where it is installed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_prune.onnx.card import read_genai_graph
from tests.graphs import Exported
from tests.refusals import refusal

from .exports import in_pytorch, make_exports


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Exported:
    return make_exports(tmp_path_factory)


def test_it_names_the_graph_and_its_cache(exported):
    _, folder = exported("llama-gqa-tied")
    config = json.loads((folder / "genai_config.json").read_text())
    decoder = config["model"]["decoder"]
    assert (config["model"]["type"], config["model"]["vocab_size"], config["model"]["eos_token_id"]) == (
        "decoder",
        40,
        1,
    )
    assert (decoder["filename"], decoder["num_hidden_layers"]) == ("model.onnx", 2)
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (2, 4)
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert "onnxruntime-genai generates with `model.onnx`" in (folder / "README.md").read_text()


def test_keys_of_another_width_than_values_cannot_be_said(exported):
    _, folder = exported("narrow-opt")
    assert not (folder / "genai_config.json").exists()
    assert "There is no `genai_config.json`: onnxruntime-genai makes the values" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["llama-gqa-tied", "uneven-llama"])
def test_it_generates(exported, name):
    """The same tokens as PyTorch, read whole each time, also if blocks have heads of their own number."""
    genai = pytest.importorskip(
        "onnxruntime_genai", reason='onnxruntime-genai is not installed: pip install ".[genai]"'
    )
    model, folder = exported(name)
    reference, ids = in_pytorch(model), [3, 4, 5]
    graph = genai.Model(str(folder))
    parameters = genai.GeneratorParams(graph)
    parameters.set_search_options(max_length=12, do_sample=False)
    generator = genai.Generator(graph, parameters)
    generator.append_tokens(ids)
    tokens = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    with torch.inference_mode():
        for _ in tokens:
            logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    assert len(tokens) > 3
    assert tokens == ids[3:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config["model"].update(decoder=[]),
            "names no graph in model.decoder.filename: export it again",
        ),
        (lambda config: config["model"]["decoder"].update(filename=3), "names no graph in model.decoder.filename"),
        (lambda config: config.update(engine={}), "says more than this package writes ('engine')"),
        (lambda config: config["model"].update(vision={}), "('vision')"),
        (lambda config: config["model"]["decoder"].update(pipeline=[]), "('pipeline')"),
        (
            lambda config: config["model"]["decoder"]["session_options"].update(custom_ops_library="x.so"),
            "('session_options'), and onnxruntime-genai may load libraries",
        ),
    ],
)
def test_a_genai_config_that_says_more_is_not_run(exported, tmp_path, change, message):
    path = Path(shutil.copy(exported("llama-gqa-tied")[1] / "genai_config.json", tmp_path))
    assert read_genai_graph(path, trust=False) == "model.onnx"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    assert message in refusal(read_genai_graph, path, trust=False)
    if "no graph" not in message:
        assert read_genai_graph(path, trust=True) == "model.onnx"
