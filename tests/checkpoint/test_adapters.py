"""A folder with a LoRA adapter of peft's as a model: merged as it is read."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import ckpt_prune
from ckpt_prune.checkpoint.adapters import base_of_adapter
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.cli.main import main
from ckpt_prune.model.containers.opening import open_model
from tests.contract.models import Case
from tests.families import make, windows

GPT2 = Case("gpt2", "GPT2LMHeadModel")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated", "ignore::UserWarning:peft")


def adapt(base, folder, targets, **settings):
    """Save an adapter with values unlike zero; returns the model that peft merges."""
    model = ckpt_prune.load(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, **settings))
    torch.manual_seed(4)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return adapted.merge_and_unload().eval()


def change(folder, **values):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    base = make(place / "base", "llama")
    merged = adapt(base, place / "adapter", ["q_proj", "down_proj"], rank_pattern={"q_proj": 2}, use_rslora=True)
    return base, place / "adapter", merged


@pytest.fixture
def adapter(llama, tmp_path):
    return shutil.copytree(llama[1], tmp_path / "adapter")


def run(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def logits(folder, ids):
    with torch.no_grad():
        return ckpt_prune.load(folder, dtype=torch.float32)(ids).logits


def test_convert_writes_what_peft_merges(llama, tmp_path):
    base, adapter, merged = llama
    code, output = run("convert", adapter, "-o", tmp_path / "out")
    assert code == 0, output
    assert "with the adapter merged" in output
    ids = windows(2, 16)
    with torch.no_grad():
        assert torch.allclose(logits(tmp_path / "out", ids), merged(ids).logits, atol=1e-5)
    assert not torch.allclose(logits(tmp_path / "out", ids), logits(base, ids), atol=1e-2)


def test_a_base_lies_where_one_stands_or_else_where_the_adapter_says_from_its_own_folder(adapter, tmp_path):
    for folder in (tmp_path / "base", adapter / "base"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    change(adapter, base_model_name_or_path="base")
    assert base_of_adapter(adapter) == "base"
    (tmp_path / "base").rename(tmp_path / "moved")
    assert base_of_adapter(adapter) == str(adapter / "base")


def test_a_prune_of_an_adapter_is_that_of_the_merged_model(llama, tmp_path):
    _, adapter, merged = llama
    merged.save_pretrained(tmp_path / "merged")
    for name in ("adapter", "merged"):
        source = adapter if name == "adapter" else tmp_path / name
        code, output = run("prune", source, "--recipe", "magnitude", "-o", tmp_path / f"{name}-out")
        assert code == 0, output
    ids = windows(2, 16)
    assert torch.allclose(logits(tmp_path / "adapter-out", ids), logits(tmp_path / "merged-out", ids), atol=1e-5)
    assert json.loads((tmp_path / "adapter-out" / "ckpt_prune.json").read_text())["source"]["name"] == "adapter"


def test_matrices_that_are_stored_transposed(tmp_path):
    base = GPT2.write(tmp_path / "base")
    merged = adapt(base, tmp_path / "adapter", ["c_attn", "c_proj"], fan_in_fan_out=True)
    ckpt_prune.convert(tmp_path / "adapter", output=tmp_path / "out")
    ids = windows(2, 16)
    with torch.no_grad():
        assert torch.allclose(logits(tmp_path / "out", ids), merged(ids).logits, atol=1e-5)
    view = Checkpoint.open(tmp_path / "adapter")
    name = next(name for name in view.tensors if name.endswith("h.0.attn.c_attn.weight"))
    assert torch.allclose(view.transpose([name]).read([name])[name], view.read([name])[name].T, atol=1e-6)


def test_another_alpha_is_another_model(adapter):
    before = Checkpoint.open(adapter).fingerprint
    change(adapter, lora_alpha=6)
    assert Checkpoint.open(adapter).fingerprint != before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LOHA"}, "an adapter of type LOHA"),
        ({"use_dora": True}, "not a plain LoRA adapter (use_dora: True"),
        ({"modules_to_save": ["lm_head"]}, "not a plain LoRA adapter (modules_to_save"),
        ({"bias": "all"}, "not a plain LoRA adapter (bias: 'all'"),
        ({"rank_pattern": {}}, "are no adapter of rank 3 for"),
        ({"rank_pattern": {"(a*)*b": 2}}, "repeats too much"),
        ({"lora_alpha": "8"}, "lora_alpha of"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "/nowhere/base"}, "/nowhere/base, which cannot be opened"),
    ],
)
def test_what_cannot_be_merged_is_refused(adapter, tmp_path, values, message):
    change(adapter, **values)
    code, output = run("prune", adapter, "--recipe", "magnitude", "-o", tmp_path / "out")
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_itself_or_without_weights_is_refused(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    code, output = run("inspect", adapter)
    assert code == 2
    assert "has no adapter_model.safetensors" in output
    change(adapter, base_model_name_or_path=str(adapter))
    code, output = run("inspect", adapter)
    assert code == 2
    assert "it is an adapter itself" in output


def test_an_adapter_of_another_model_is_refused(adapter, tmp_path):
    change(adapter, base_model_name_or_path=str(GPT2.write(tmp_path / "other")))
    code, output = run("inspect", adapter)
    assert code == 2
    assert "base_model_name_or_path names another model than the adapter was trained on" in output


def test_whole_models_are_wanted_elsewhere(adapter, tmp_path):
    (tmp_path / "text.txt").write_text("some words of a text " * 100)
    code, output = run("evaluate", adapter, "--text", tmp_path / "text.txt", "--window", 16)
    assert code == 2
    assert f"`ckpt-prune convert {adapter} -o MERGED` makes one" in output
    code, output = run("prune", adapter, "--recipe", "magnitude", "-o", tmp_path / "out", "--evaluate", tmp_path)
    assert code == 2
    assert "-o MERGED` makes one" in output


def test_an_output_with_code_of_its_own_takes_adapters(tmp_path):
    """peft puts adapters beside its linears, saves them, and loads them again."""
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    ckpt_prune.prune(
        make(tmp_path / "base"), recipe="magnitude", overrides=uneven, output=tmp_path / "out", progress=False
    )
    merged = adapt(tmp_path / "out", tmp_path / "adapter", "all-linear")
    ids = windows(2, 16)
    model = peft.PeftModel.from_pretrained(ckpt_prune.load(tmp_path / "out", dtype=torch.float32), tmp_path / "adapter")
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
    ckpt_prune.convert(tmp_path / "adapter", output=tmp_path / "merged")
    assert torch.allclose(logits(tmp_path / "merged", ids), expected, atol=1e-5)
    assert not torch.allclose(logits(tmp_path / "out", ids), expected, atol=1e-2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, expected, atol=1e-5)
    for name in ("modeling_pruned.py", "mlx_pruned.py"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


TEMPLATE = "{% for m in messages %}{{ m['content'] }}<done>{% endfor %}"


def save_tokenizer(folder, end, template=None, more=()):
    inner = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<end>", "<done>", *more])
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, unk_token="<unk>", chat_template=template
    ).save_pretrained(folder)


@pytest.fixture
def with_tokenizers(llama, tmp_path):
    """A base whose tokenizer ends texts in another way than its adapter's, and conversations."""
    base, adapter, _ = llama
    shutil.copytree(base, tmp_path / "base")
    shutil.copytree(adapter, tmp_path / "adapter")
    change(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    save_tokenizer(tmp_path / "base", "<end>", "the base's: {{ messages }}")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "adapter" / "README.md").unlink(missing_ok=True)
    rows = {"messages": [{"role": "user", "content": "the cat " * 40}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(rows) + "\n") * 8)
    return tmp_path


def prune(place, *more):
    words = ("--recipe", "ridge", "--ratio", "0.5", "--samples", "4", "--window", "16")
    return run("prune", place / "adapter", *words, "--text", place / "chat.jsonl", "-o", place / "pruned", *more)


def test_the_tokenizer_of_the_adapters_folder_goes_before_its_bases(with_tokenizers):
    place = with_tokenizers
    save_tokenizer(place / "adapter", "<done>", TEMPLATE)
    (place / "adapter" / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    code, output = run("convert", place / "adapter", "-o", place / "out")
    assert code == 0, output
    assert "tokenizer.json, tokenizer_config.json (the adapter's folder has its own)" in output
    code, output = prune(place)
    assert code == 0, output
    for name in ("out", "pruned"):
        tokenizer = AutoTokenizer.from_pretrained(place / name)
        assert (tokenizer.eos_token, tokenizer.chat_template) == ("<done>", TEMPLATE)
        assert json.loads((place / name / "generation_config.json").read_text())["eos_token_id"] == [3, 4]
    # A plan of the output's own tokenizer is of the same reader: its fingerprint is that of the files together.
    readers = [open_model(str(place / name)).reader_fingerprint for name in ("adapter", "out")]
    assert readers[0] == readers[1]


def test_a_template_alone_goes_with_the_tokenizer_of_the_base(with_tokenizers):
    place = with_tokenizers
    (place / "adapter" / "chat_template.jinja").write_text("the adapter's: {{ messages[0]['content'] }}")
    code, output = prune(place)
    assert code == 0, output
    tokenizer = AutoTokenizer.from_pretrained(place / "pruned")
    assert tokenizer.eos_token == "<end>"
    assert tokenizer.chat_template.startswith("the adapter's")


def test_tokens_that_the_adapter_adds_beyond_the_embedding_are_refused(with_tokenizers):
    place = with_tokenizers
    rows = json.loads((place / "base" / "config.json").read_text())["vocab_size"]
    save_tokenizer(place / "adapter", "<done>", TEMPLATE, [f"<{i}>" for i in range(rows)])
    for command in ("convert", "inspect"):
        code, output = run(command, place / "adapter", *(("-o", place / "out") if command == "convert" else ()))
        assert code == 2
        assert f"as token {rows}, and the embedding of {place / 'base'} has {rows} rows" in output


@pytest.fixture
def beside(llama, tmp_path):
    """An adapter beside full weights; its config names another base, which transformers does not look for."""
    base, adapter, _ = llama
    folder = shutil.copytree(base, tmp_path / "beside")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, folder)
    change(folder, base_model_name_or_path="org/elsewhere")
    return folder


@pytest.mark.parametrize("words", [("prune", "--recipe", "magnitude-50", "--ratio", "0"), ("convert",)])
def test_an_adapter_beside_weights_is_merged_into_them(llama, beside, tmp_path, words):
    code, output = run(words[0], beside, *words[1:], "-o", tmp_path / "out")
    assert code == 0, output
    assert not list((tmp_path / "out").glob("adapter*"))
    ids = windows(2, 16)
    with torch.no_grad():
        merged = llama[2](ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(beside, dtype=torch.float32)(ids).logits
    assert torch.allclose(theirs, merged, atol=1e-5)
    assert torch.allclose(logits(tmp_path / "out", ids), merged, atol=1e-5)
    assert not torch.allclose(logits(llama[0], ids), merged, atol=0.1)


def test_what_is_rounded_are_the_weights_with_the_adapter_beside_them(beside, tmp_path):
    assert run("convert", beside, "-o", tmp_path / "merged")[0] == 0
    for name in ("beside", "merged"):
        code, output = run("quantize", tmp_path / name, "--format", "int8", "-o", tmp_path / f"{name}-8")
        assert code == 0, output
    stored = [(tmp_path / f"{name}-8" / "model.safetensors").read_bytes() for name in ("beside", "merged")]
    assert stored[0] == stored[1]
    assert not list((tmp_path / "beside-8").glob("adapter*"))


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "{}", "--generate", "hello"),
        ("export", "{}", "--no-validate", "-o", "out"),
        ("export", "{}", "--format", "gguf", "--no-validate", "-o", "out.gguf"),
        ("validate", "{}", "--runtime", "transformers", "--text", __file__),
        ("benchmark", "{}", "{}"),
    ],
)
def test_an_adapter_beside_weights_is_refused_by_what_loads_whole_models(beside, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, output = run(*(word.format(beside) for word in words))
    assert code == 2, output
    merge = f"`ckpt-prune convert {beside} -o MERGED` makes one"
    assert output.splitlines()[-1] == f"Error: {beside} holds an adapter, and this loads whole models: {merge}"


def test_a_pickled_adapter_beside_weights_is_refused(beside):
    (beside / "adapter_model.safetensors").rename(beside / "adapter_model.bin")
    code, output = run("prune", beside, "--recipe", "magnitude", "-o", beside.parent / "out")
    assert code == 2
    assert "has no adapter_model.safetensors" in output
