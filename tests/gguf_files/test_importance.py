"""The importance of inputs: from statistics, from llama.cpp's files, and what it does to rounding."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.importance import importance_of_statistics, read_imatrix, write_imatrix
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.rounding import encode
from ckpt_prune.gguf.types import kinds_of
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.rounding.codes import decode
from tests import families
from tests.cli.running import ok, run
from tests.gguf_files.test_families import MIXTURE
from tests.gguf_files.tiny import proving, save

LLAMA_CPP = {
    # Of ffn_down: in the first eighth of the blocks, and in others. Outer: of the head, and of the embedding.
    "iq2_xs": {"attn_v": "Q2_K", "ffn_down": ("Q2_K", "IQ2_XS"), "attn_output": "IQ2_XS", "outer": ("Q5_K", "Q2_K")},
    "iq2_m": {"attn_v": "IQ3_S", "ffn_down": ("IQ3_S", "IQ2_S"), "attn_output": "IQ3_S", "outer": ("Q5_K", "IQ3_S")},
    "iq4_xs": {
        "attn_v": "IQ4_XS",
        "ffn_down": ("IQ4_XS", "IQ4_XS"),
        "attn_output": "IQ4_XS",
        "outer": ("Q6_K", "IQ4_XS"),
    },
    "q4_0": {"attn_v": "Q4_0", "ffn_down": ("Q4_1", "Q4_0"), "attn_output": "Q4_0", "outer": ("Q8_0", "Q8_0")},
}
"""What llama.cpp's source (llama-quant.cpp) says of files whose inputs are weighed; the head of q4_0 is our choice."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("importance") / "model",
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_key_value_heads=4,
        initializer_range=0.03,
    )


@pytest.fixture(scope="module")
def statistics(model):
    return families.calibrate(model, model.parent / "stats", folds=2, collect=("moments", "linears"))


def opened(model):
    return open_model(str(model), Opening(False))


def test_it_is_the_mean_square_of_what_each_matrix_reads(model, statistics):
    importance = importance_of_statistics(statistics, opened(model))
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    inputs = {}
    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, name=name: inputs.__setitem__(name, given[0].detach()))
    whole(families.windows())
    names = {"attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.up_proj"}
    for name, module in {**names, "ffn_down": "mlp.down_proj"}.items():
        expected = inputs[f"model.layers.3.{module}"].flatten(0, 1).square().mean(0)
        found = torch.from_numpy(importance[f"blk.3.{name}.weight"]).double()
        # Hidden states of float32 behind three blocks of 512 products each.
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-6 * float(expected.mean()))
    assert len(importance) == 8 * 7


def test_what_llama_cpp_reads_is_written_and_read_again(model, statistics, tmp_path):
    out = tmp_path / "imatrix.gguf"
    said = json.loads(
        ok("statistics", "export", str(statistics.folder), "--model", str(model), "--imatrix", str(out), "--json")
    )
    assert (said["matrices"], said["tokens"]) == (56, statistics.index.tokens)
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.chunk_count"].contents() == 8
    importance = importance_of_statistics(statistics, opened(model))
    again = read_imatrix(out, lay_out(opened(model)))
    assert again.keys() == importance.keys()
    for name, values in importance.items():
        assert np.allclose(again[name], values, rtol=2**-22)
    assert (
        "--overwrite replaces it"
        in run("statistics", "export", str(statistics.folder), "--model", str(model), "--imatrix", str(out)).output
    )
    ok("statistics", "export", str(statistics.folder), "--model", str(model), "--imatrix", str(out), "--overwrite")


def test_every_expert_has_an_importance_of_its_own(tmp_path):
    """It is measured on the expert's own tokens, and lowers the weighed error of each. The router has none."""
    folder = save(tmp_path / "mixture", "qwen3_moe", **MIXTURE | {"norm_topk_prob": True, "num_hidden_layers": 2})
    statistics = families.calibrate(folder, tmp_path / "stats", collect=("moments", "linears"))
    model = opened(folder)
    importance = importance_of_statistics(statistics, model)
    name = "blk.1.ffn_gate_exps.weight"
    own = torch.from_numpy(importance[name])
    assert own.shape == (5, 32)
    assert not any(torch.allclose(own[0], other) for other in own[1:])
    assert not any("ffn_gate_inp" in each for each in importance)
    write_imatrix(tmp_path / "i.gguf", statistics, model)
    assert np.allclose(read_imatrix(tmp_path / "i.gguf", lay_out(model))[name], importance[name], rtol=2**-22)
    weights = lay_out(model).tensors[name].read().float()
    plain, weighed = (
        decode(np.concatenate([*encode(name, weights, Kind.IQ4_NL, given)]), Kind.IQ4_NL).view(weights.shape)
        for given in (np.ones((5, 32), np.float32), importance[name])
    )
    losses = [((each - weights).square() * own[:, None]).sum((1, 2)) for each in (plain, weighed)]
    assert bool((losses[1] < losses[0]).all())


def test_statistics_of_all_matrices_are_asked_for(model, tmp_path):
    few = families.calibrate(model, tmp_path / "few", collect=("moments",))
    with pytest.raises(UserError, match="inputs of all matrices: measure again"):
        importance_of_statistics(few, opened(model))


def test_an_importance_matrix_of_another_model_is_refused(model, statistics, tmp_path):
    out = tmp_path / "imatrix.gguf"
    ok("statistics", "export", str(statistics.folder), "--model", str(model), "--imatrix", str(out))
    narrow = save(tmp_path / "narrow", "llama", num_hidden_layers=1)
    with pytest.raises(UserError, match=r"has \d+ inputs, and \d+ in this model: it was measured on another one"):
        read_imatrix(out, lay_out(opened(narrow)))
    out.write_bytes(out.read_bytes()[:300])
    with pytest.raises(UserError, match=r"no importance matrix of llama.cpp, or damaged"):
        read_imatrix(out, lay_out(opened(model)))


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_types_of_a_weighed_file_are_those_of_llama_cpp(model, kind):
    kinds = {name: each.name for name, each in kinds_of(lay_out(opened(model)), kind, weighted=True)[0].items()}
    expected = LLAMA_CPP[kind]
    assert {kinds[f"blk.{index}.attn_v.weight"] for index in range(8)} == {expected["attn_v"]}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.4.ffn_down.weight"]) == expected["ffn_down"]
    assert kinds["blk.4.attn_output.weight"] == expected["attn_output"]
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == expected["outer"]


def test_so_few_bits_want_importance(model, tmp_path):
    with pytest.raises(UserError, match=r"iq2_xs has so few bits.*--statistics STATS.*or --imatrix FILE"):
        export_gguf(str(model), tmp_path / "m.gguf", proving(model), kind="iq2_xs", proof=False)
    assert not list(tmp_path.iterdir())


def test_outputs_of_a_weighed_file_are_nearer_and_run_in_llama_cpp(model, statistics, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    files = {}
    for name, given in {"plain": [], "weighed": ["--statistics", str(statistics.folder)]}.items():
        files[name] = tmp_path / f"{name}.gguf"
        words = ["export", str(model), "--format", "gguf", "--dtype", "q2_k", *given, "-o", str(files[name])]
        said = json.loads(ok(*words, "--json", *([] if given else ["--no-validate"])))
        assert said["written"]
    importance = importance_of_statistics(statistics, opened(model))
    lost = dict.fromkeys(files, 0.0)
    for name, weight in lay_out(opened(model)).tensors.items():
        if name in importance:
            for which, file in files.items():
                apart = open_gguf(file).read(name).double() - weight.read().double()
                lost[which] += float((apart.square() * torch.from_numpy(importance[name])).sum())
    assert lost["weighed"] < lost["plain"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--statistics", "S", "--imatrix", "I"], "give one of them"),
        (["--imatrix", "I"], "--imatrix goes with --format gguf"),
    ],
)
def test_options_that_do_not_go_together(model, statistics, tmp_path, given, says):
    (tmp_path / "I").touch()
    names = {"S": str(statistics.folder), "I": str(tmp_path / "I")}
    words = [names.get(word, word) for word in given]
    result = run("export", str(model), *words, "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert says in result.output
