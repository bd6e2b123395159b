"""Tokens that end a text, that take the white space beside them, and that stand around a chat: as transformers."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf import special_tokens
from ckpt_prune.gguf.export import export_gguf, validate_gguf
from ckpt_prune.gguf.llama_cpp import LlamaCppTask, run_llama_cpp
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.special_tokens import find_stops
from ckpt_prune.gguf.tokenizer import read_tokenizer
from tests.gguf_files.test_tokenizer import pieces
from tests.gguf_files.tiny import TEXT, proving, save

ROWS = 2048
ENDS = ["<<stop>>", "<<turn>>", "<<tool>>", "<<four>>", "<|im_end|>", "<|fim_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<<{{ m['role'] }}>>\n{{ m['content'] }}<<stop>>\n{% endfor %}"
    "{% if add_generation_prompt %}<<assistant>>\n{% endif %}"
)


def with_tokens(folder, *tokens, bos="<s>", frame=None, template=TEMPLATE, ends=None, eos="<<stop>>", kind="llama"):
    """A tiny model with a tokenizer of bytes, some added tokens, a chat template and ends of a text."""
    save(folder, kind, tie_word_embeddings=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<s>", *ENDS, *tokens])
    if frame:
        ids = [(each, tokenizer.token_to_id(each)) for each in frame.split() if each != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ids)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template
    ).save_pretrained(folder)
    named = [tokenizer.token_to_id(end) for end in ends] if isinstance(ends, list) else ends
    named = tokenizer.token_to_id(named) if isinstance(named, str) else named
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    return folder


def turns(**flags):
    return [
        AddedToken(f"<<{role}>>", special=True, normalized=False, **flags) for role in ("user", "assistant", "system")
    ]


def file_of(folder, **more):
    return export_gguf(str(folder), folder.parent / "m.gguf", proving(folder), kind="f32", overwrite=True, **more)


def stops_of(folder, ids):
    """The ids at which llama.cpp ends a text."""
    return run_llama_cpp(LlamaCppTask(str(folder.parent / "m.gguf"), 32, ends=list(ids))).stops


@pytest.mark.parametrize(
    ("ends", "keys", "left", "also"),
    [
        ("<<turn>>", {"eot": "<<turn>>"}, [], ["<<stop>>"]),
        (["<<turn>>", "<<stop>>", "<<tool>>"], {"eot": "<<turn>>", "eom": "<<tool>>"}, [], []),
        # What llama.cpp knows by its text gives its place to another.
        (
            ["<|im_end|>", "<<stop>>", "<<tool>>", "<|fim_pad|>", "<<turn>>"],
            {"eot": "<<tool>>", "eom": "<<turn>>"},
            [],
            [],
        ),
        (["<<stop>>", "<<turn>>", "<<tool>>", "<<four>>"], {"eot": "<<turn>>", "eom": "<<tool>>"}, ["<<four>>"], []),
    ],
)
def test_llama_cpp_ends_a_text_where_generate_does_and_other_ends_are_named(tmp_path, ends, keys, left, also):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = with_tokens(tmp_path / "model", *turns(), ends=ends)
    exported = file_of(folder)
    assert exported.passed
    values = open_gguf(exported.path).values
    ids = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}
    named = {key: values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    assert named == {"eos": ids["<<stop>>"], "eot": None, "eom": None} | {key: ids[end] for key, end in keys.items()}
    wanted = {ends} if isinstance(ends, str) else {*ends}
    stops = {"<<stop>>", *wanted, "<|im_end|>", "<|fim_pad|>"} - {*left}
    assert {ids[each] for each in stops} == find_stops(values) == {*stops_of(folder, range(256, 312))}
    lines = "\n".join(exported.notes)
    assert [f"llama.cpp goes on after {each} ({ids[each]})" in lines for each in left] == [True] * len(left)
    assert ("goes on after" in lines) == bool(left)
    for each in also:
        assert f"{each} ({ids[each]})" in next(line for line in exported.notes if "where generate goes on" in line)


def test_the_texts_at_which_llama_cpp_stops_are_those_of_this_llama_cpp(tmp_path):
    """Every text that the list has, and some like them, in llama.cpp itself; twice, for some take others out."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    # Of each kind of token for code llama.cpp takes one, and finds the others only where that one is not.
    code = {"<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<fim-repo>", "<REPO>", "<reponame>"}
    for number, without in enumerate(({"<|tool_response>", "<|call|>", "<|calls|>"}, set())):
        texts = sorted(special_tokens.ENDS - {*ENDS} - code - without)
        folder = with_tokens(
            tmp_path / str(number), *texts, "<|stop|>", "</end>", "<|im_start|>", ends="<<stop>>", template=None
        )
        exported = file_of(folder, proof=False)
        values = open_gguf(exported.path).values
        tokens = values["tokenizer.ggml.tokens"]
        stops = stops_of(folder, range(256, 340))
        assert sorted(tokens[each] for each in find_stops(values)) == sorted(tokens[each] for each in stops)


def test_a_file_that_goes_on_after_an_end_is_refused(tmp_path):
    """As files of other tools, which take the tokenizer's end alone."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = with_tokens(tmp_path / "model", *turns(), ends="<<stop>>")
    file = file_of(folder, proof=False).path
    assert validate_gguf(file, str(folder), proving(folder)).passed
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [301, 303]}))
    with pytest.raises(UserError, match=r"llama.cpp goes on after <<tool>> \(303\), where generate ends a text"):
        validate_gguf(file, str(folder), proving(folder))


def test_an_end_takes_the_place_of_the_one_that_a_tokenizer_lacks(tmp_path):
    """A file without an end would stop at llama.cpp's default, token 11."""
    folder = with_tokens(tmp_path / "model", ends=["<<tool>>", "<<turn>>"], eos=None)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    read = read_tokenizer(folder, ROWS)
    tokens = read.values["tokenizer.ggml.tokens"]
    assert tokens[read.values["tokenizer.ggml.eos_token_id"]] == "<<tool>>"
    (folder / "generation_config.json").unlink()
    assert f"llama.cpp also ends a text at {tokens[11]} (11)" in "\n".join(read_tokenizer(folder, ROWS).notes)


@pytest.mark.parametrize("flag", ["rstrip", "lstrip", "single_word"])
def test_tokens_that_take_white_space_are_named_and_refused_where_the_template_has_some(tmp_path, flag):
    template = (
        TEMPLATE.replace("}}<<stop>>", "}} <<stop>>").replace(">>\n", ">>a") if flag == "single_word" else TEMPLATE
    )
    template = template.replace("<<{{", "\n<<{{") if flag == "lstrip" else template
    folder = with_tokens(tmp_path / "model", *turns(**{flag: True}), ends="<<stop>>", template=template)
    with pytest.raises(
        UserError, match=rf"has {flag} for <<user>>, <<assistant>>, <<system>>, .*chat template as other"
    ):
        file_of(folder, proof=False)
    assert not list(tmp_path.glob("*.gguf*"))
    bare = template.replace("\n", "").replace(">>a", ">> ")
    folder = with_tokens(tmp_path / "bare", *turns(**{flag: True}), ends="<<stop>>", template=bare)
    [line] = [line for line in read_tokenizer(folder, ROWS).notes if flag in line]
    assert "<<user>>, <<assistant>>, <<system>>, which llama.cpp does not follow" in line


def test_a_template_without_the_white_space_is_proven_on_its_tokens(tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    template = TEMPLATE.replace(">>\n", ">>")
    folder = with_tokens(tmp_path / "model", *turns(rstrip=True), ends="<<stop>>", template=template)
    assert file_of(folder).passed


PHI = ["<unk>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("kind", "name", "strips"), [("phi3", "model", True), ("llama", "Phi-3-like", True), ("llama", "phi3-x", False)]
)
def test_a_name_with_phi_3_in_it_is_given_where_tokens_take_white_space_and_nowhere_else(tmp_path, kind, name, strips):
    """llama.cpp goes by the name of the file."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    every = [
        AddedToken(each, special=True, normalized=False, rstrip=strips) for each in [*ENDS[:4], "<|im_end|>", "</s>"]
    ]
    folder = with_tokens(tmp_path / name, *PHI, *turns(rstrip=strips), *every, ends="<<stop>>", kind=kind)
    read = read_tokenizer(folder, ROWS)
    assert ("phi-3" in read.name.lower()) == strips
    assert "phi3" not in read.name.lower()
    if not strips:
        assert file_of(folder).passed


@pytest.mark.parametrize("writes_first", [True, False])
def test_a_template_may_write_the_first_token_or_leave_it_to_llama_cpp(tmp_path, writes_first):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    template = "{{ bos_token }}" * writes_first + TEMPLATE
    folder = with_tokens(tmp_path / "model", *turns(), frame="<s> $A", template=template, ends="<<stop>>")
    exported = file_of(folder)
    assert exported.passed
    assert exported.proof.texts == 5 + 3
    said = "llama.cpp begins chats with <s>, which apply_chat_template leaves out" in exported.notes
    assert said is not writes_first


def test_a_template_that_becomes_other_tokens_is_refused(tmp_path, monkeypatch):
    """The letters are the same: a token of the template is text to llama.cpp."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = with_tokens(tmp_path / "model", *turns(), ends="<<stop>>")
    content = special_tokens.Flags.__init__

    def lose(self, tokenizer, values):
        values["tokenizer.ggml.token_type"][values["tokenizer.ggml.tokens"].index("<<user>>")] = 1
        content(self, tokenizer, values)

    monkeypatch.setattr(special_tokens.Flags, "__init__", lose)
    with pytest.raises(
        UserError, match=r"llama.cpp splits '<<user>>.* into other tokens than the checkpoint's tokenizer"
    ):
        file_of(folder)


OF_LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [None, OF_LLAMA_2])
def test_a_folder_with_the_tokenizer_files_of_llama_2_follows_tokenizer_json(tmp_path, template):
    """transformers' own LlamaTokenizer joins a space at the front with the one that it puts there."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = pieces(save(tmp_path / "model", "llama", bos_token_id=1, eos_token_id=2), prefix=True)
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": False,
        "add_bos_token": True,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for file in folder.glob("chat_template*"):
        file.unlink()
    exported = file_of(folder)
    assert exported.passed
    assert exported.proof.texts == 5 + 3 * (template is not None)
    assert any(
        "transformers' LlamaTokenizer splits ' ' into other tokens than tokenizer.json" in line
        for line in exported.notes
    )
