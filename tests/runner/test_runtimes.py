"""`--for` and `runs_on`: what does not run where it is meant to is refused early, and widths are multiples."""

import json
import shutil

import pytest
from click.testing import CliRunner

import ckpt_prune
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_count
from ckpt_prune.gguf.architectures import ARCHITECTURES, DIFFERENT
from ckpt_prune.model.runtimes import RUNTIMES, changes_of_config, places, read_target, refusal, types_exported
from tests.cli.running import read_refusal
from tests.contract.models import Case


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Case("llama", "LlamaForCausalLM").write(tmp_path_factory.mktemp("models") / "llama")


def test_families_of_llama_cpp_are_those_that_gguf_files_are_written_of():
    runtime = RUNTIMES["llama.cpp"]
    decoders = {each.model_type for each in ARCHITECTURES if not (each.encodes or each.stacked)}
    assert set(runtime.families or ()) == decoders
    assert (
        set(runtime.families_of["biases"])
        == set(runtime.families_of["attention"])
        == {architecture.model_type for architecture in DIFFERENT if architecture.biases is None}
    )


def test_the_help_of_prune_says_what_runs_where():
    help_text = " ".join(run("prune", "--help").split())
    assert "two thin matrices in place of one all but llama.cpp" in help_text
    assert "rotary pairs all but genai, llama.cpp, vllm, mlx" in help_text


def commands(exported=(), **config):
    llama = {"model_type": "llama"} | config
    return places(llama, masked=False, generates=True, auto_class="AutoModelForCausalLM", exported=exported)


def test_each_runtime_has_the_commands_that_make_and_run_what_it_takes():
    by_runtime = commands()
    assert by_runtime["transformers"] == ['AutoModelForCausalLM.from_pretrained("OUT")']
    assert by_runtime["llama.cpp"] == ["ckpt-prune export OUT --format gguf -o OUT.gguf", "llama-cli -m OUT.gguf"]
    export = "ckpt-prune export OUT -o OUT/onnx"
    assert by_runtime["openvino"] == [export, 'openvino.Core().compile_model("OUT/onnx/model.onnx")']
    assert by_runtime["transformers.js"][1].endswith(
        'AutoModelForCausalLM.from_pretrained("onnx", {subfolder: "", dtype: "fp32"})'
    )


def test_what_the_recipe_has_exported_is_run_as_it_is():
    by_runtime = commands(("int4",))
    assert by_runtime["onnxruntime"] == ['onnxruntime.InferenceSession("OUT/onnx/model_q4.onnx")']
    assert by_runtime["genai"] == ['onnxruntime_genai.Model("OUT/onnx")']
    assert 'dtype: "q4"' in by_runtime["transformers.js"][0]
    assert by_runtime["llama.cpp"][0].startswith("ckpt-prune export")
    # OpenVINO takes float32 alone, and a folder that is there is not written again.
    export = "ckpt-prune export OUT -o OUT-onnx"
    assert by_runtime["openvino"] == [export, 'openvino.Core().compile_model("OUT-onnx/model.onnx")']
    assert commands(("q4_k_m",))["llama.cpp"] == ["llama-cli -m OUT/model-q4_k_m.gguf"]
    assert len(commands(("q4_k_m",))["genai"]) == 2
    encoder = places({"model_type": "bert"}, masked=False, generates=False, auto_class="AutoModel", exported=("q8_0",))
    assert encoder["llama.cpp"] == ["llama-embedding -m OUT/model-q8_0.gguf"]


@pytest.mark.parametrize(
    ("export", "types"),
    [
        (None, ()),
        ({"format": "onnx"}, ("fp32",)),
        ({"format": "onnx", "dtype": "int8"}, ("int8",)),
        ({"format": "onnx", "dtype": ["fp16", "int4"]}, ("fp16", "int4")),
        ({"format": "gguf", "dtype": []}, ("bf16",)),
        ({"format": "gguf", "dtype": "q4_0"}, ("q4_0",)),
    ],
)
def test_types_that_a_recipe_exports(export, types):
    assert types_exported({"dtype": "bfloat16"}, export) == types


@pytest.mark.parametrize(("bits", "types"), [(4, ("q4_0",)), (8, ("bf16",))])
def test_a_file_of_rounded_weights_has_their_type(bits, types):
    weights = {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"} | weights
    assert types_exported({"dtype": "bfloat16", "quantization_config": config}, {"format": "gguf"}) == types


@pytest.mark.parametrize("text", ["ollama", "vllm:q4_0", "llama.cpp:", "exllamav3:", "transformers:int4", ""])
def test_what_is_no_runtime_is_refused(text):
    with pytest.raises(UserError, match=r"is no (runtime|option)"):
        read_target(text)


@pytest.mark.parametrize(
    ("target", "columns", "multiple"),
    [
        ("llama.cpp:q4_0", 1, 32),
        ("llama.cpp:q6_k", 64, 4),
        ("llama.cpp:q4_0", 64, 1),
        ("vllm:tp4", 64, 4),
        ("mlx", 1, 1),
        ("exllamav3", 1, 128),
        ("exllamav3", 64, 2),
        ("sglang:tp2", 64, 2),
    ],
)
def test_multiples_are_of_rows_or_of_units(target, columns, multiple):
    assert read_target(target).multiple(columns) == multiple


def test_a_family_that_a_runtime_lacks_for_different_blocks_is_refused():
    assert refusal("llama.cpp", "gemma3_text", {"widths", "heads"}, generates=True) is None
    assert "--recipe ridge" in str(refusal("llama.cpp", "gemma3_text", {"biases"}, generates=True))
    assert "best-uniform" in str(refusal("mlx", "gemma3_text", {"widths"}, generates=True))
    assert refusal("llama.cpp", "mpnet", set(), generates=False) is not None
    assert refusal("openvino", "bert", {"heads"}, generates=False) is None


def test_latent_attention_is_promised_where_its_cache_is_taken(tmp_path):
    """Its cache has the latent vector in place of keys, and one rotated key in place of values."""
    model, out = Case("deepseek_v3", "DeepseekV3ForCausalLM").write(tmp_path / "model"), tmp_path / "out"
    given = [str(model), "--recipe", "magnitude", "--ratio", "0.25", "-o", str(out)]
    assert read_refusal("prune", *given, "--for", "genai") == (
        "genai does not take outputs with latent attention (MLA), whose cache has two widths: take another runtime, "
        "such as onnxruntime or llama.cpp"
    )
    blocks = ["--set", "widths=per_layer", "--for"]
    assert "latent attention in code of their own" in read_refusal("prune", *given, *blocks, "vllm")
    run("prune", *given, *blocks, "onnxruntime", "--dry-run")
    run("prune", *given, "--for", "vllm")
    card = (out / "README.md").read_text()
    assert "| vllm |" in card
    assert "| genai |" not in card
    own = {"auto_map": {"AutoModel": "x"}, "qk_head_dim": 4}
    assert changes_of_config(own) == {"qk"}
    assert changes_of_config(own | {"kv_lora_rank": 8, "v_head_dim": 2}) == {"cache", "latent blocks"}


@pytest.mark.parametrize("by", ["option", "recipe"])
def test_widths_are_multiples(tmp_path, llama, by):
    given = {"runs_on": "vllm:tp4"} if by == "option" else {"overrides": {"runs_on": ["vllm:tp4", "transformers"]}}
    out = tmp_path / "out"
    ckpt_prune.prune(llama, recipe="magnitude", ratio=0.3, output=out, progress=False, **given)
    config, dense = (json.loads((folder / "config.json").read_text()) for folder in (out, llama))
    assert config["intermediate_size"] % 4 == 0
    assert config["intermediate_size"] < dense["intermediate_size"]
    assert changes_of_config(config) == set()
    card = (out / "README.md").read_text()
    assert "| vllm | `vllm serve PATH` |" in card
    assert ckpt_prune.verify(out).passed


def run(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("any_tokenizer")
def test_multiples_say_what_they_cost_in_size(tmp_path, llama):
    """Against the same prune without them, parameter by parameter; in a dry run, a plan and a prune."""
    shared = [llama, "--recipe", "magnitude", "--set", "spaces.heads.ratio=0", "--ratio", "0.3"]
    run("prune", *shared, "-o", tmp_path / "plain")
    output = run("prune", *shared, "--for", "llama.cpp:q4_0", "-o", tmp_path / "out")
    reports = [json.loads((tmp_path / name / "ckpt_prune.json").read_text()) for name in ("plain", "out")]
    sizes = [report["after"]["parameters"] for report in reports]
    more = human_count(sizes[1] - sizes[0])
    line = f"multiples for llama.cpp:q4_0 leave {more} parameters ("
    assert "for llama.cpp:q4_0, widths are multiples of 2 (heads), 32 (mlp)\n" in output
    ranked = [llama, "--recipe", "flap-global", "--for", "llama.cpp:q4_0", "-o", tmp_path / "ranked", "--dry-run"]
    says = "should be multiples of 2 (heads), 32 (mlp), but allocation across-layers-and-spaces does not keep"
    assert says in run("prune", *ranked)
    assert sizes[1] > sizes[0]
    assert line in output
    assert line in run("prune", *shared, "--for", "llama.cpp:q4_0", "-o", tmp_path / "dry", "--dry-run")
    assert line in run("plan", *shared, "--for", "llama.cpp:q4_0", "-o", tmp_path / "plan.json")
    assert "multiples for" not in run("prune", *shared, "--for", "vllm", "-o", tmp_path / "dry", "--dry-run")


def test_the_card_names_no_runtime_that_refuses_the_output(tmp_path, llama):
    out = tmp_path / "out"
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    ckpt_prune.prune(llama, recipe="magnitude", overrides=uneven, output=out, progress=False)
    assert changes_of_config(json.loads((out / "config.json").read_text())) <= {"widths", "heads"}
    card = (out / "README.md").read_text()
    assert "| vllm | `vllm serve PATH --trust-remote-code` |" in card
    assert "| llama.cpp |" not in card  # which has no tokenizer of whole words


@pytest.mark.usefixtures("any_tokenizer")
def test_experts_are_no_part_of_a_row(tmp_path):
    """Any number of them may stay, for types whose rows are multiples of 32 or 256."""
    model = Case("mixtral", "MixtralForCausalLM").write(tmp_path / "model")
    given = ["--recipe", "expert-frequency", "--ratio", "0.25", "--for", "llama.cpp:q4_0"]
    data = ["--text", __file__, "--window", "16", "--samples", "4"]
    said = run("prune", model, *given, *data, "--dry-run", "-o", tmp_path / "out")
    assert "multiples of" not in said
    assert "experts 3/4" in said


@pytest.mark.usefixtures("any_tokenizer")
def test_biases_that_llama_cpp_does_not_add_are_refused_before_they_are_fitted(tmp_path, llama):
    model = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    data = ["--text", __file__, "--window", "16", "--samples", "8", "--for", "llama.cpp", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["prune", str(model), "--recipe", "flap", *data])
    reason = "ernie4_5: it computes use_bias False, and config.json has True"
    assert f"no architecture of llama.cpp computes what this recipe makes ({reason}): take one that" in done.output
    assert done.exit_code == 2
