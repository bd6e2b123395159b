"""Vision transformers, OPT and BERT: published names, which class a checkpoint holds, what does not fit its config."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.matching import match_family
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config
from ckpt_prune.model.supported import declared_family
from tests import refusals
from tests.encoders import HIDDEN, VARIANTS, edit_files, make, stock
from tests.pairs import one_of

PUBLISHED = {
    # google/vit-base-patch16-224, facebook/deit-tiny-patch16-224, facebook/dinov2-base and -giant, facebook/opt-125m,
    # google-bert/bert-base-uncased.
    "vit": ["vit.encoder.layer.0.attention.attention.query.weight", "vit.encoder.layer.0.intermediate.dense.bias"],
    "deit": ["deit.encoder.layer.2.attention.output.dense.weight", "deit.encoder.layer.2.layernorm_before.bias"],
    "dinov2-model": ["encoder.layer.0.attention.attention.key.bias", "encoder.layer.1.mlp.fc1.weight"],
    "dinov2-swiglu": ["encoder.layer.0.mlp.weights_in.weight", "encoder.layer.0.mlp.weights_out.bias"],
    "opt": ["model.decoder.layers.0.self_attn.k_proj.bias", "model.decoder.embed_positions.weight", "lm_head.weight"],
    "bert-mlm": ["bert.encoder.layer.0.attention.self.value.weight", "cls.predictions.transform.LayerNorm.weight"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {variant: make(root / variant, variant) for variant in VARIANTS}


def refusal(folder) -> str:
    return refusals.refusal(check_source, Model.open(folder))


@pytest.mark.parametrize("variant", PUBLISHED)
def test_checkpoints_have_the_published_names(folders, variant):
    assert set(PUBLISHED[variant]) <= load_file(folders[variant] / "model.safetensors").keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_class_that_holds_every_tensor_is_found(folders, variant):
    model = Model.open(folders[variant])
    check_source(model)
    family = model.family
    assert family.architecture == VARIANTS[variant].architecture
    assert family.block == VARIANTS[variant].disk["block"].replace("{}", "{block}")
    assert family.modality == ("image" if VARIANTS[variant].vision else "text")
    assert type(stock(folders[variant], variant)).__name__ == family.architecture


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
def test_names_round_trip(folders, variant):
    """Disk → model → disk, and values: each tensor on disk is the model's parameters, one after the other."""
    checkpoint = Checkpoint.open(folders[variant])
    family = match_family(checkpoint)
    names = Names(build_skeleton(parse_config(checkpoint.config), family.architecture))
    values = stock(folders[variant], variant).state_dict()
    stored = load_file(folders[variant] / "model.safetensors")
    stored.pop("bert.embeddings.position_ids", None)
    for disk, tensor in stored.items():
        parameters = names.parameters(disk)
        assert parameters, disk
        assert torch.equal(torch.cat([values[name] for name in parameters]), tensor), disk
        assert names.shape(disk) == tuple(tensor.shape)
        renamed = variant in ("bert-old-names", "bert-no-prefix", "opt-no-prefix")
        assert renamed or {names.saved_as(name) for name in parameters} == {disk}
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(names.missing(stored)) <= tied
    assert names.parameters("encoder.layer.0.nothing.weight") == ()
    assert names.shape("nothing") is None


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
@pytest.mark.parametrize("role", ["query", "in", "mlp"])
def test_a_missing_tensor_is_named_as_on_disk(tmp_path, variant, role):
    folder, chosen = make(tmp_path / "m", variant), VARIANTS[variant]
    name = chosen.tensor(1, role)
    edit_files(folder, lambda tensors, config: {n: t for n, t in tensors.items() if n != name})
    message = refusal(folder)
    if variant.endswith("no-prefix"):
        # What is not there has the name it is saved under.
        name = {"opt": "model.", "bert": "bert."}[chosen.model_type] + name
    assert message == f"{folder} lacks tensor {name} (1 missing), which its config.json asks for"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tensor_too_many_is_refused(tmp_path, variant):
    folder = make(tmp_path / "m", variant)
    name = f"{VARIANTS[variant].disk['block'].format(1)}adapter.weight"
    edit_files(folder, lambda tensors, config: tensors | {name: torch.zeros(2, 2)})
    # Where no class fits, the one that config.json names is spoken of: it has no place for four more of pretraining.
    count = 5 if variant == "bert-pretraining" else 1
    assert refusal(folder) == f"{folder} has tensor {name} ({count} such), which config.json has no place for"


@pytest.mark.parametrize("variant", one_of(4, VARIANTS))
@pytest.mark.parametrize("role", ["key", "in"])
def test_a_tensor_of_another_shape_is_named_as_on_disk(tmp_path, variant, role):
    folder, chosen = make(tmp_path / "m", variant), VARIANTS[variant]
    name = chosen.tensor(2, role)
    rows = HIDDEN if role == "key" else chosen.mlp * (2 if chosen.swiglu else 1)
    edit_files(folder, lambda tensors, config: tensors | {name: tensors[name][:-2].clone()})
    assert refusal(folder) == f"{folder}: {name} has shape [{rows - 2}, {HIDDEN}], config.json says [{rows}, {HIDDEN}]"


def test_position_indices_are_no_weights(tmp_path):
    """int64, and not refused for it; any other integer tensor is."""
    folder = make(tmp_path / "m", "bert-old-names")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors["bert.embeddings.position_ids"].dtype == torch.int64
    check_source(Model.of(checkpoint))
    name = "bert.encoder.layer.0.output.dense.weight"
    edit_files(folder, lambda tensors, config: tensors | {name: tensors[name].to(torch.int64)})
    assert refusal(folder) == f"{name} is torch.int64: only bfloat16, float16 and float32 checkpoints can be pruned"


def test_what_config_names_is_taken_where_it_fits(folders):
    """A masked-LM checkpoint is one, although BertForPreTraining has a place for all of its tensors too."""
    assert match_family(Checkpoint.open(folders["bert-mlm"])).architecture == "BertForMaskedLM"
    declared = declared_family(Checkpoint.open(folders["bert-pretraining"]).config)
    assert declared.architecture == "BertForMaskedLM"
    assert match_family(Checkpoint.open(folders["bert-pretraining"])).auto_class == "AutoModelForPreTraining"


def test_a_config_without_architectures(tmp_path):
    folder = make(tmp_path / "m", "vit-model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures")
    (folder / "config.json").write_text(json.dumps(config))
    model = Model.open(folder)
    check_source(model)
    assert model.family.architecture == "ViTModel"
