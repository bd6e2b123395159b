"""sentence-transformers folders: their structure travels, and what is measured is the embedding."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.running import edit_weights, ok, read_refusal
from tests.cli.test_evaluate_encoder import nudge
from tests.encoders import make
from tests.sentence_folders import make_sentences

PRUNE = ("--recipe", "magnitude", "--set", "spaces.heads.ratio=0", "--set", "spaces.mlp.ratio=0.5")
OWN = {
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
}
TEXT = "the cat sat\n\non a mat and then\nthe dog ran far away\n  \nthe cat\n"


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `dense`, `near` (the same, moved a little), `plain` (without modules) and `lines.txt`."""
    monkeypatch.chdir(tmp_path)
    for name in ("dense", "near"):
        make_sentences(Path(name), dense=True)
    edit_weights("near", nudge(0.1))
    make_sentences(Path("plain"))
    Path("plain/modules.json").unlink()
    Path("lines.txt").write_text(TEXT)
    return Path("dense")


def test_the_structure_travels(dense: Path) -> None:
    ok("prune", "dense", *PRUNE, "-o", "out")
    for name in OWN:
        assert (Path("out") / name).read_bytes() == (dense / name).read_bytes()
    assert set(json.loads(Path("out/ckpt_prune.json").read_text())["side_files"]) >= OWN
    assert "FAILED" not in ok("verify", "out", "--against", "dense")
    card = Path("out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert '\nmodel = SentenceTransformer("PATH")\n```\n' in card
    ok("prune", "dense", *PRUNE, "--container", "remote", "-o", "remote")
    assert 'SentenceTransformer("PATH", trust_remote_code=True)\n' in Path("remote/README.md").read_text()
    # A second output takes the first one's place, and what somebody put among its files is not lost.
    ok("prune", "dense", *PRUNE, "-o", "out", "--overwrite")
    Path("out/1_Pooling/notes.txt").write_text("mine")
    assert read_refusal("prune", "dense", *PRUNE, "-o", "out", "--overwrite") == (
        f"{Path('out').absolute() / '1_Pooling' / 'notes.txt'} was not written with the output that is there, and the "
        "new one needs its name; move it away or choose another output name"
    )


def test_modules_that_are_not_known_here_travel_all_the_same(dense: Path) -> None:
    """Modules of a sparse encoder begin with another class; those not used to embed here are not checked."""
    modules = json.loads(Path("dense/modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    Path("dense/modules.json").write_text(json.dumps(modules))
    ok("prune", "dense", *PRUNE, "-o", "out")
    assert Path("out/2_Dense/config.json").is_file()
    assert read_refusal("evaluate", "out", "--against", "near", "--text", "lines.txt", "--window", "20") == (
        "out/modules.json does not begin with a Transformer in the folder itself"
    )


def test_weights_of_a_module_that_are_a_pickle_are_refused(dense: Path) -> None:
    Path("dense/2_Dense/model.safetensors").rename("dense/2_Dense/pytorch_model.bin")
    assert read_refusal("prune", "dense", *PRUNE, "-o", "out") == (
        "dense/2_Dense has its weights in pytorch_model.bin only, a pickle: store them as model.safetensors"
    )


@pytest.mark.parametrize("head", [False, True])
def test_an_encoder_that_names_another_class_than_its_modules_use(dense: Path, head: bool) -> None:
    """It is no model for masked tokens, whether or not its files hold the head for them."""
    data = ("--text", "lines.txt", "--window", "20")
    ok("prune", "dense", *PRUNE, "-o", "bare")
    expected = json.loads(ok("evaluate", "bare", "--against", "dense", *data, "--json"))
    if head:
        make(Path("mlm"), "bert-mlm")
        weights = load_file("dense/model.safetensors")
        kept = {name: weights[name] for name in weights if not name.startswith("pooler.")}
        theirs = load_file("mlm/model.safetensors")
        tensors = {f"bert.{name}": tensor for name, tensor in kept.items()}
        tensors |= {name: tensor for name, tensor in theirs.items() if name.startswith("cls.")}
        save_file(tensors, "dense/model.safetensors", {"format": "pt"})
    config = json.loads(Path("dense/config.json").read_text())
    Path("dense/config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    ok("prune", "dense", *PRUNE, "-o", "out")
    report = json.loads(ok("evaluate", "out", "--against", "dense", *data, "--json"))
    assert report["cosine"] == pytest.approx(expected["cosine"], abs=1e-6)
    assert 0 < report["cosine"] < 0.9999
    ok("verify", "out", "--against", "dense")
    heads = [name for name in load_file("out/model.safetensors") if name.startswith("cls.")]
    assert bool(heads) == head


def test_what_cannot_be_compared_is_refused(dense: Path) -> None:
    data = ("--text", "lines.txt", "--window", "20")
    assert read_refusal("evaluate", "dense", *data) == (
        "dense has no head, so there is nothing to score: compare it with --against MODEL2"
    )
    assert read_refusal("evaluate", "dense", "--against", "plain", *data) == (
        "dense is a sentence-transformers folder and plain is not (it has no modules.json): what they give for a text "
        "cannot be compared"
    )
    assert read_refusal("evaluate", "dense", "--against", "near", *data, "--samples", "2") == (
        "the text has 2 lines that are not empty, each a text; 3 are needed"
    )
