"""`prune --vocabulary`: what an output computes, what its files say, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.stages.vocabulary.records import VocabularyRecord, pack_rows
from ckpt_prune.stages.vocabulary.sentencepiece_file import filter_pieces
from tests.cli.running import ok, run
from tests.interrupting import interrupt_at
from tests.stages.vocabulary.tokenizers_of_tests import byte_fallback, byte_level, page, save_llama, wordpiece

TEXT = ("--text", "page.txt")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "page.txt").write_text(page(), encoding="utf-8")
    save_llama(folder / "dense", byte_level(), extra=12)
    save_llama(folder / "untied", byte_fallback(), tied=False)
    return folder


@pytest.fixture
def place(made, monkeypatch) -> Path:
    monkeypatch.chdir(made)
    return made


def record_of(folder: Path) -> VocabularyRecord:
    report = json.loads((folder / "ckpt_prune.json").read_text(encoding="utf-8"))
    return VocabularyRecord.read(report["vocabulary"])


def assert_same_logits(models, kept: list[int], ours: torch.Tensor, **inputs: torch.Tensor) -> None:
    """Logits of the tokens that stay, by a dense model and one without the others, up to the order of a head's sums.

    A product with fewer rows may be cut into other blocks. Both sums of n products are within n ε Σ|x w| of the exact
    one (Higham 2002, 3.1), which is at most n ε ‖x‖ ‖w‖.
    """
    with torch.no_grad():
        dense, smaller = (
            model(input_ids=ids, output_hidden_states=True, **inputs)
            for model, ids in zip(models, (torch.tensor(kept)[ours], ours), strict=True)
        )
    states, weight = dense.hidden_states[-1], models[1].get_output_embeddings().weight
    assert torch.equal(states, smaller.hidden_states[-1])
    norms = states.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)
    bound = 2 * states.shape[-1] * torch.finfo(torch.float32).eps * norms
    assert ((dense.logits[..., kept] - smaller.logits).abs() <= bound).all()


@pytest.mark.parametrize("dense", ["dense", "untied"])
def test_kept_tokens_have_their_logits_and_verify_proves_it(place, dense, tmp_path):
    out = tmp_path / "out"
    ok("prune", dense, "--vocabulary", "384", *TEXT, "-o", str(out))
    kept = record_of(out).kept_rows
    assert len(kept) == 384
    before, after = (load_file(folder / "model.safetensors") for folder in (place / dense, out))
    for name, tensor in before.items():
        rows = name.startswith(("model.embed_tokens", "lm_head"))
        assert torch.equal(after[name], tensor[kept] if rows else tensor)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (place / dense, out)]
    ours = torch.randint(len(kept), (2, 40), generator=torch.Generator().manual_seed(0))
    assert_same_logits(models, kept, ours)
    said = ok("verify", str(out), "--against", dense)
    assert "hard texts are decoded as by the dense tokenizer" in said
    assert "bit for bit" in said


def test_numbers_of_tokens_follow_wherever_they_stand(place, tmp_path):
    out = tmp_path / "out"
    dense = tmp_path / "named"
    save_llama(dense, byte_level())
    tokenizer = AutoTokenizer.from_pretrained(dense)
    word = tokenizer.convert_tokens_to_ids("Ġthe")
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"image_token_id": word}))
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, word], "suppress_tokens": [word]}))
    (dense / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    (dense / "merges.txt").write_text("#version: 0.2\na b\n")
    (dense / "tekken.json").write_text("{}")
    (tmp_path / "list.txt").write_text("Ġof\n")
    said = ok("prune", str(dense), "--vocabulary", f"{tmp_path / 'list.txt'}", "-o", str(out))
    assert "tekken.json" in said
    smaller = AutoTokenizer.from_pretrained(out)
    new = smaller.convert_tokens_to_ids("Ġthe")
    assert smaller.convert_tokens_to_ids("Ġof") != smaller.unk_token_id
    kept = record_of(out).kept_rows
    assert kept[new] == word
    assert len(kept) % 64 == 0
    values = {name: json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json")}
    assert values["config.json"]["image_token_id"] == new
    assert values["config.json"]["vocab_size"] == len(kept)
    assert values["generation_config.json"]["eos_token_id"] == [2, new]
    assert values["generation_config.json"]["suppress_tokens"] == [new]
    assert json.loads((out / "vocab.json").read_text()) == smaller.get_vocab()
    merges = (out / "merges.txt").read_text().splitlines()
    content = json.loads((out / "tokenizer.json").read_text())
    assert merges == ["#version: 0.2", *(" ".join(pair) for pair in content["model"]["merges"])]
    assert not (out / "tekken.json").exists()


def test_rows_that_a_recipe_names_stay_and_nothing_is_counted_for_them(place, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    ok("prune", "dense", "--vocabulary", "384", *TEXT, "-o", str(first))
    monkeypatch.setattr("ckpt_prune.stages.vocabulary.settle.count_tokens", lambda *_: pytest.fail("counted"))
    named = ("--recipe", "vocabulary", "--set", f"vocabulary.kept={record_of(first).kept}", *TEXT)
    ok("prune", "dense", *named, "-o", str(second))
    for name in ("model.safetensors", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    ok("verify", str(second), "--against", "dense")
    rows = record_of(first).rows
    for other in (pack_rows(range(rows + 1)), pack_rows([rows - 1])):
        done = run("prune", "dense", "--recipe", "vocabulary", "--set", f"vocabulary.kept={other}", "-o", "no")
        assert "Error: vocabulary.kept names rows of another model" in done.output


def test_rows_that_a_recipe_names_may_lack_tokens_that_wait_for_a_use(place, tmp_path):
    dense, first, second = tmp_path / "spare", tmp_path / "first", tmp_path / "second"
    tokenizer = byte_level()
    tokenizer.add_special_tokens([f"<unused{number}>" for number in range(8)])
    save_llama(dense, tokenizer)
    ok("prune", str(dense), "--vocabulary", "384", *TEXT, "-o", str(first))
    assert not any("unused" in token for token in AutoTokenizer.from_pretrained(first).get_vocab())
    named = ("--recipe", "vocabulary", "--set", f"vocabulary.kept={record_of(first).kept}")
    ok("prune", str(dense), *named, "-o", str(second))
    assert record_of(second).kept == record_of(first).kept
    for named in ("latin", "first:400"):
        ok("prune", str(dense), "--vocabulary", named, *TEXT, "-o", str(tmp_path / "named"), "--overwrite")
        tokens = AutoTokenizer.from_pretrained(tmp_path / "named").get_vocab()
        assert "Ġthe" in tokens
        assert not any("unused" in token for token in tokens)


def test_scripts_go_first_and_the_rest_of_a_multiple_is_filled(place, tmp_path):
    out = tmp_path / "out"
    ok("prune", "dense", "--vocabulary", "latin", "--set", "vocabulary.multiple_of=16", "-o", str(out))
    tokens = AutoTokenizer.from_pretrained(out).get_vocab()
    assert "Ġthe" in tokens
    gone = AutoTokenizer.from_pretrained(place / "dense").get_vocab().keys() - tokens.keys()
    assert gone
    assert record_of(out).rows_kept % 16 == 0
    # What is gone is Russian alone: letters of two bytes, and words of them.
    assert all(bytes(1) and any(letter in "ÐÑ" for letter in token) for token in gone)


def test_the_default_costs_no_more_than_allowed_and_says_so_before_anything_is_written(place, tmp_path):
    line = ("--vocabulary", "auto", "--set", "vocabulary.cost=5%", "--set", "vocabulary.multiple_of=8", *TEXT)
    said = ok("prune", "dense", *line, "--dry-run")
    assert "page.txt, its held-out eighth, takes" in said
    assert "bits per byte" in said
    out = tmp_path / "out"
    ok("prune", "dense", *line, "-o", str(out))
    (text,) = record_of(out).texts
    assert text.loss is not None
    assert text.loss <= 0.05
    assert record_of(out).rows_kept < 500
    assert "Vocabulary" in (out / "README.md").read_text(encoding="utf-8")


def test_the_text_part_of_a_composite_loses_tokens_and_its_whole_finds_those_of_images(place, tmp_path):
    tokenizer = byte_level()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": tokenizer.get_vocab_size(), "num_key_value_heads": 1, "head_dim": 16}
    image = tokenizer.get_vocab_size() - 3
    config = transformers.Gemma3Config(
        text_config=text, vision_config=sizes | {"image_size": 56, "patch_size": 14}, mm_tokens_per_image=4,
        boi_token_index=image + 1, eoi_token_index=image + 2, image_token_index=image,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "whole")
    dense, out = str(tmp_path / "whole"), tmp_path / "out"
    ok("prune", dense, "--part", "text", "--vocabulary", "384", *TEXT, "-o", str(out))
    kept = record_of(out).kept_rows
    whole = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert kept[whole["image_token_index"]] == image
    assert [kept[whole[key]] for key in ("boi_token_index", "eoi_token_index")] == [image + 1, image + 2]
    assert whole["text_config"]["vocab_size"] == len(kept) == 384
    models = [
        transformers.Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        for folder in (dense, out)
    ]
    ours = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    ours[0, 3:7] = whole["image_token_index"]
    pixels = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    assert_same_logits(models, kept, ours, pixel_values=pixels)
    assert "other parts" in ok("verify", str(out), "--against", dense)


def test_it_comes_before_spaces_and_counts_in_a_size(place, tmp_path):
    out = tmp_path / "both"
    params = sum(tensor.numel() for tensor in load_file(place / "dense" / "model.safetensors").values())
    options = ("--recipe", "magnitude", "--target-params", "80%", *TEXT, "--json")
    done = json.loads(ok("prune", "dense", "--vocabulary", "384", *options, "-o", str(out)))
    assert done["before"]["parameters"] == params
    assert done["after"]["parameters"] <= 0.8 * params
    assert record_of(out).rows_kept == 384
    assert "bit for bit" not in run("verify", str(out), "--against", "dense").stderr
    alone = tmp_path / "alone"
    done = json.loads(
        ok("prune", "dense", "--vocabulary", "auto", "--target-params", "90%", *TEXT, "--json", "-o", str(alone))
    )
    assert 0.8 * params < done["after"]["parameters"] <= 0.9 * params


def test_on_text_whose_tokens_all_stay_nothing_is_lost_and_bits_per_byte_say_so(place, tmp_path):
    out, part = tmp_path / "out", tmp_path / "part.txt"
    part.write_text(page()[:6000], encoding="utf-8")
    ok("prune", "untied", "--vocabulary", "text", "--text", str(part), "-o", str(out))
    assert record_of(out).texts[0].growth == 0
    line = ("evaluate", str(out), "--against", "untied", "--text", str(part), "--window", "64", "--samples", "6")
    result = json.loads(ok(*line, "--json"))
    assert result["kl"] < 1e-6
    assert result["top1_agreement"] == 1
    # The head has fewer tokens to share its probability among.
    assert 0.8 * result["against"]["bits_per_byte"] < result["bits_per_byte"] < result["against"]["bits_per_byte"]
    assert result["tokens"] == result["against"]["tokens"]
    assert "bits per byte" in ok(*line)


def test_a_masked_language_model_loses_rows_of_its_head_and_bias_too(place, tmp_path):
    tokenizer = wordpiece()
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    torch.nn.init.normal_(model.cls.predictions.bias)
    model.save_pretrained(tmp_path / "bert")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names).save_pretrained(tmp_path / "bert")
    lines = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    bert, out = str(tmp_path / "bert"), tmp_path / "out"
    ok("prune", bert, "--vocabulary", "latin,320", *TEXT, "-o", str(out))
    record = record_of(out)
    kept = record.kept_rows
    assert (record.kind, len(kept), record.texts[0].bits_before) == ("WordPiece", 320, None)
    biases = [load_file(Path(folder) / "model.safetensors")["cls.predictions.bias"] for folder in (bert, out)]
    assert torch.equal(biases[1], biases[0][kept])
    written = (out / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert written == [lines[index] for index in kept]
    assert "hard texts are decoded as by the dense tokenizer" in ok("verify", str(out), "--against", bert)


def test_a_sentencepiece_model_beside_loses_the_same_pieces():
    pieces = ["<unk>", "<s>", "</s>", "▁a", "▁b", "c"]

    def field(number: int, kind: int, body: bytes) -> bytes:
        return bytes([number << 3 | kind]) + (bytes([len(body)]) if kind == 2 else b"") + body

    def piece(text: str) -> bytes:
        return field(1, 2, field(1, 2, text.encode()) + field(2, 5, b"\0\0\x80\xbf"))

    def trainer(size: int, last: int) -> bytes:
        return field(2, 2, field(4, 0, bytes([size])) + b"\xd0\x02" + bytes([last]) + field(3, 2, b"keep"))

    def model(texts: list[str], last: int) -> bytes:
        return b"".join(map(piece, texts)) + trainer(len(texts), last) + field(3, 2, b"normal")

    kept = [0, 1, 2, 4]
    cut = filter_pieces(model(pieces, 5), {pieces[at] for at in kept} | {"c"})
    assert cut == model([*(pieces[at] for at in kept), "c"], 4)


def test_an_interrupted_run_is_continued_to_the_same_bytes(place, tmp_path):
    line = ("prune", "dense", "--vocabulary", "384", *TEXT)
    ok(*line, "-o", str(tmp_path / "whole"))
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 2)
        run(*line, "-o", str(tmp_path / "out"))
    ok(*line, "--resume", "-o", str(tmp_path / "out"))
    names = ("model.safetensors", "tokenizer.json", "config.json")
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == [
        (tmp_path / "whole" / name).read_bytes() for name in names
    ]
