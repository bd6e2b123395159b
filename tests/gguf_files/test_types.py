"""Mixtures of types: more bits where llama.cpp gives them, rounded by llama.cpp, and proven in it."""

from collections import Counter
from functools import cache
from typing import get_args

import gguf
import numpy as np
import pytest
import torch

from ckpt_prune import prune, quantize
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import MixedGgufType, OtherTypes
from ckpt_prune.gguf import rounding
from ckpt_prune.gguf.export import export_gguf, validate_gguf
from ckpt_prune.gguf.file_plan import FilePlanner
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.rounding import encode
from ckpt_prune.gguf.types import OUTER, kinds_of, tensor_bytes, type_of_file
from ckpt_prune.job.layout import Output, layout_of
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.cost import cost_of
from tests.gguf_files.test_source import edit_file
from tests.gguf_files.tiny import MIXTURE, proving, save

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "initializer_range": 0.03}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return save(tmp_path_factory.mktemp("types") / "model", "llama", **WIDE)


def types(file, tensor):
    return [open_gguf(file).tensors[f"blk.{index}.{tensor}.weight"].kind.name for index in range(8)]


def test_rows_are_rounded_in_parts(monkeypatch):
    """Two of seven rows in a part; what is not finite is refused by its name."""
    monkeypatch.setattr(rounding, "_CHUNK", 64)
    kind, weight = gguf.GGMLQuantizationType.Q8_0, torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    parts = list(encode("w", weight, kind))
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert np.array_equal(np.concatenate(parts), gguf.quantize(weight.numpy(), kind))
    for value in (torch.nan, torch.inf):
        weight[6, 0] = value
        with pytest.raises(UserError, match=r"^w has NaN or Inf: repair the checkpoint first$"):
            list(encode("w", weight, kind))


def test_more_bits_leave_less_error(tmp_path):
    small = save(tmp_path / "model", "llama", **WIDE | {"intermediate_size": 256, "num_hidden_layers": 2})
    layout = lay_out(open_model(str(small), Opening(False)))
    matrices = {name: weight.read()[:32].float() for name, weight in layout.tensors.items() if len(weight.shape) == 2}
    errors, sizes, generator = [], [], np.random.default_rng(0)
    importance = {name: generator.random(rows.shape[-1], dtype=np.float32) + 0.1 for name, rows in matrices.items()}

    @cache
    def lose(name, stored):
        """Return what a matrix loses in a type; mixtures share most of theirs."""
        encoded = np.concatenate(list(encode(name, matrices[name], stored, importance[name])))
        apart = torch.from_numpy(gguf.dequantize(encoded, stored)) - matrices[name]
        return float((apart.square() * torch.from_numpy(importance[name])).sum())

    for kind in get_args(MixedGgufType):
        kinds, notes = kinds_of(layout, kind, weighted=True)
        assert not notes
        sizes.append(sum(tensor_bytes(layout, kinds).values()))
        errors.append(sum(lose(name, kinds[name]) for name in matrices))
    # Types of as many bits are close to each other; those of a whole bit less are not.
    whole = {kind: (size, error) for kind, size, error in zip(get_args(MixedGgufType), sizes, errors, strict=True)}
    rising = [whole[kind] for kind in ("iq1_s", "iq2_xxs", "iq2_m", "iq3_xs", "iq4_xs", "q5_k_m", "q6_k")]
    assert rising == sorted(rising)
    assert [error for _, error in rising] == sorted((error for _, error in rising), reverse=True)


def test_mxfp4_holds_experts_and_what_is_stored_so_is_not_rounded_again(tmp_path):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for most in (2, 4, 8):  # blocks of small numbers alone get a smaller scale, and the same numbers
        codes = torch.randint(0, most, (5, 2, 32), generator=generator)
        signs = 1 - 2.0 * torch.randint(0, 2, codes.shape, generator=generator)
        exact = (numbers[codes] * signs * torch.exp2(torch.randint(-9, 3, (5, 2, 1), generator=generator))).flatten(1)
        stored = np.concatenate(list(encode("w", exact, gguf.GGMLQuantizationType.MXFP4)))
        assert np.array_equal(gguf.dequantize(stored, gguf.GGMLQuantizationType.MXFP4), exact.numpy())
    sizes = MIXTURE | {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    folder = save(tmp_path / "model", "qwen3_moe", **sizes | {"moe_intermediate_size": 32, "norm_topk_prob": True})
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="mxfp4")
    assert exported.passed
    file = open_gguf(tmp_path / "m.gguf")
    assert type_of_file(file) == "mxfp4"
    kinds = {name.split(".", 2)[-1]: info.kind.name for name, info in file.tensors.items() if len(info.shape) > 1}
    assert {kinds.pop(f"ffn_{part}_exps.weight") for part in ("gate", "up", "down")} == {"MXFP4"}
    assert kinds.pop("ffn_gate_inp.weight") == "F32"
    assert set(kinds.values()) == {"Q8_0"}


def test_mxfp4_is_refused_where_there_are_no_experts(wide, tmp_path):
    with pytest.raises(UserError, match="mxfp4 is a type of experts, and this model has none: take another"):
        export_gguf(str(wide), tmp_path / "m.gguf", proving(wide), kind="mxfp4")


def test_a_mixture_runs_in_llama_cpp_and_gives_more_bits_to_the_blocks_that_llama_cpp_gives_them(wide, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    out = tmp_path / "m.gguf"
    exported = export_gguf(str(wide), out, proving(wide), kind="q4_k_m")
    assert exported.passed
    assert exported.proof.kl < 0.05
    more = ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]  # first and last eighth, every third
    assert types(out, "attn_v") == types(out, "ffn_down") == more
    assert types(out, "attn_q") == types(out, "ffn_up") == ["Q4_K"] * 8
    assert open_gguf(out).values["general.file_type"] == 15


def test_rows_that_do_not_divide_get_other_types_and_a_line_says_so_before_work_starts(tmp_path, capsys, monkeypatch):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = save(tmp_path / "model", "llama", intermediate_size=272)
    messages = []
    monkeypatch.setattr(
        "ckpt_prune.gguf.export.write_gguf", lambda *_: messages.append(capsys.readouterr().err) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="q4_k_m", proof=False)
    monkeypatch.undo()
    assert "rows of 32, 288 are no multiple of 256" in messages[0]
    assert "39 matrices are q5_0 and not q4_k" in messages[0]
    assert "(prune with --for llama.cpp:q4_k_m)" in messages[0]
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="q4_k_m", proof=False)
    kinds = Counter(tensor.kind.name for tensor in open_gguf(exported.path).tensors.values())
    assert kinds == {"F32": 13, "Q5_0": 39, "Q8_0": 5}
    assert type_of_file(open_gguf(exported.path)) == "q4_k_m"
    unstated = edit_file(exported.path, tmp_path / "unstated.gguf", **{"general.file_type": None})
    assert type_of_file(open_gguf(unstated)) == "f32"  # as its matrices were rewritten
    proof = validate_gguf(exported.path, str(folder), proving(folder))
    assert "no limit is put on what q4_k_m loses: it is measured" in proof.lines()
    assert proof.passed


def test_what_ggml_rounds_is_refused_before_work_where_it_is_not_installed(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(rounding, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"q4_k, q6_k are rounded by ggml.*pip install .\.\[llamacpp\]."):
        export_gguf(str(wide), tmp_path / "m.gguf", proving(wide), kind="q4_k_m", proof=False)
    assert not list(tmp_path.iterdir())
    assert export_gguf(str(wide), tmp_path / "m.gguf", proving(wide), kind="q4_0", proof=False).passed


@pytest.mark.parametrize(
    ("tied", "kind", "embedding"), [(True, "q8_0", "q4_0"), (False, "q4_0", "q5_k"), (False, "q4_k_m", "f16")]
)
def test_the_embedding_and_the_head_have_the_type_that_is_asked_for_and_run_in_llama_cpp(
    tmp_path, tied, kind, embedding
):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model = save(tmp_path / "model", "llama", **WIDE | {"num_hidden_layers": 2, "tie_word_embeddings": tied})
    usual, chosen = (
        export_gguf(
            str(model),
            tmp_path / f"{each}.gguf",
            proving(model),
            kind=kind,
            others=OtherTypes(embedding=each),
            proof=each is not None,
        )
        for each in (None, embedding)
    )
    assert chosen.passed
    kinds = {name: tensor.kind.name.lower() for name, tensor in open_gguf(chosen.path).tensors.items()}
    others = {name: tensor.kind.name.lower() for name, tensor in open_gguf(usual.path).tensors.items()}
    outer = {"token_embd.weight"} if tied else {"token_embd.weight", "output.weight"}
    assert {name: kinds[name] for name in outer} == dict.fromkeys(outer, embedding)
    assert {name: each for name, each in kinds.items() if name not in outer} == {
        name: each for name, each in others.items() if name not in outer
    }
    coarse = embedding == "q4_0"
    assert chosen.proof.type == (f"{kind} with an embedding of {embedding}" if coarse else kind)
    # 4 bits of the embedding are farther from PyTorch than the limit of 8 says.
    assert (chosen.proof.allowed is None) == (coarse or kind != "q8_0")
    assert validate_gguf(chosen.path, str(model), proving(model)).passed


def test_an_embedding_whose_rows_do_not_divide_is_refused_with_the_types_that_it_can_have(tmp_path):
    model = save(tmp_path / "model", "llama", hidden_size=96, num_hidden_layers=1)
    says = r"q4_k has blocks of 256 columns, and the embedding has 96: take f32, .*, q8_0, q5_1, q5_0, .*, iq4_nl$"
    others = OtherTypes(embedding="q4_k")
    with pytest.raises(UserError, match=says):
        export_gguf(str(model), tmp_path / "m.gguf", proving(model), kind="q4_0", others=others, proof=False)
    assert not list(tmp_path.glob("*.gguf*"))


def test_single_matrices_have_the_types_of_the_first_expression_that_matches_and_bytes_are_known_before(wide, tmp_path):
    """A file with a type of its own for the head, and the plan of a pruned model is the size of its file."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    others = OtherTypes("q5_0", "q8_0", {r"blk\.[01]\.ffn": "q6_k", "ffn_(up|gate)": "iq4_nl", "blk": "f16"})
    out = tmp_path / "m.gguf"
    exported = export_gguf(str(wide), out, proving(wide), kind="q8_0", others=others)
    assert exported.passed
    assert exported.proof.type == "q8_0 with matrices of iq4_nl"
    assert types(out, "ffn_up") == ["Q6_K"] * 2 + ["IQ4_NL"] * 6
    assert types(out, "ffn_down") == ["Q6_K"] * 2 + ["F16"] * 6
    kinds = {name: tensor.kind for name, tensor in open_gguf(out).tensors.items()}
    assert [kinds[name].name for name in OUTER] == ["Q5_0", "Q8_0"]
    planner = FilePlanner(open_model(str(wide)))
    plan = planner.plan("q8_0", others)
    assert plan.kinds == kinds
    assert plan.bytes == out.stat().st_size
    changes = ["allocation=across-layers", "widths=per_layer", "container=remote"]
    pruned = prune(str(wide), recipe="magnitude", ratio=0.4, overrides=changes, output=tmp_path / "pruned").path
    model = open_model(str(pruned), Opening(trust=True))
    output = Output(stored_container(model.checkpoint), layout_of(model), cost_of(model))
    planned = planner.plan("q4_0", output=output)
    exported = export_gguf(str(pruned), tmp_path / "p.gguf", proving(wide), kind="q4_0", proof=False)
    assert planned.architecture == "deci"
    assert 0 <= exported.bytes - planned.bytes <= 96  # the task in the output's card, and a name of its own


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (OtherTypes(matrices={"ffn_dwn": "q4_k"}), "ffn_dwn=q4_k matches no matrix of the file: names are blk.0"),
        (OtherTypes(matrices={"attn": "q4_k", "attn_v": "q6_k"}), "attn_v=q6_k decides nothing: what it matches"),
        (OtherTypes("q6_k", matrices={"token_embd": "q4_k"}), "token_embd=q4_k decides nothing"),
        (
            OtherTypes(matrices={"attn_v": "iq2_xs"}),
            "--tensor-type iq2_xs has so few bits that llama.cpp wants to know",
        ),
    ],
)
def test_a_type_that_no_matrix_can_take_is_refused(wide, tmp_path, others, says):
    with pytest.raises(UserError, match=says):
        export_gguf(str(wide), tmp_path / "m.gguf", proving(wide), kind="q8_0", others=others, proof=False)
    assert not list(tmp_path.iterdir())


def test_an_int4_checkpoint_keeps_its_codes_in_q4_0(tmp_path):
    """Also in blocks whose largest weight is no -8: gguf-py would give those other steps, and so other weights."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model, out = save(tmp_path / "model", "llama", **sizes), tmp_path / "m.gguf"
    packed = quantize(str(model), output=tmp_path / "packed", format="int4", text=proving(model).text, window=32).path
    exported = export_gguf(str(packed), out, proving(model))
    assert exported.type == "q4_0"
    assert exported.passed
    assert exported.proof.kl < 0.01  # llama.cpp rounds inputs and the embedding to 8 bits
    check_same_weights(out, packed)
    with pytest.raises(UserError, match="quantised by compressed-tensors"):
        open_model(str(packed))


def check_same_weights(out, packed):
    weights = lay_out(open_model(str(packed), Opening(packed=True))).tensors
    blocks = {name: weight for name, weight in weights.items() if "blk." in name and len(weight.shape) == 2}
    assert len(blocks) == 14
    file = open_gguf(out)
    for name, weight in blocks.items():
        assert file.tensors[name].kind.name == "Q4_0"
        torch.testing.assert_close(file.read(name).float(), weight.read().float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "columns"), [("int8", 101), ("int4", 101), ("int4", 98), ("int8", 96)])
def test_rows_that_end_in_the_middle_of_a_word_are_read(tmp_path, kind, columns):
    """Each scale is of a whole row; the last word of a row is filled up, and what fills it is no column."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model = save(tmp_path / "model", "llama", intermediate_size=columns, num_hidden_layers=2)
    packed = quantize(str(model), output=tmp_path / "packed", format=kind, group_size="channel").path
    dense, read = (open_model(str(each), Opening(packed=True)).checkpoint for each in (model, packed))
    names = [name for name in dense.tensors if "_proj" in name]
    assert {name: read.tensors[name].shape for name in names} == {name: dense.tensors[name].shape for name in names}
    for name, (plain, rounded) in {name: (dense.read([name])[name], read.read([name])[name]) for name in names}.items():
        steps = plain.abs().amax(1, keepdim=True) / (127 if kind == "int8" else 7)
        # No number is farther than half a step, which is no larger than that of the largest number; cut ones are.
        assert ((plain - rounded).abs() <= 0.51 * steps).float().mean() > 0.98, name
    exported = export_gguf(str(packed), tmp_path / "m.gguf", proving(model), kind="f32")
    assert exported.passed


@pytest.mark.parametrize("change", ["shape", "missing"])
def test_a_shape_that_does_not_fit_its_words_is_refused(tmp_path, change):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from safetensors.torch import load_file, save_file

    model = save(tmp_path / "model", "llama", num_hidden_layers=1)
    packed = quantize(str(model), output=tmp_path / "packed", format="int8").path
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_shape"
    if change == "shape":
        tensors[name] = torch.tensor([32, 0])
    else:
        del tensors[name]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"down_proj.weight_packed has no shape or scales that fit it"):
        open_model(str(packed), Opening(packed=True))


def test_one_recipe_prunes_rounds_and_ends_in_a_file_of_the_same_weights(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model = save(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{version: 1, name: small, ratio: 0.3, spaces: {mlp: {score: rcpu, compensation: {method: ridge}}}, "
        "quantize: {format: int4}, export: {format: gguf}}"
    )
    text = proving(model).text
    out = prune(str(model), recipe=str(recipe), text=text, window=32, samples=8, output=tmp_path / "out").path
    check_same_weights(out / "model-q4_0.gguf", out)
    assert "llama-cli -m PATH/model-q4_0.gguf" in (out / "README.md").read_text()
    notices = prune(str(model), recipe=str(recipe), text=text, window=32, samples=8, output=out, resume=True).notices
    assert not any("missing" in line for line in notices)
