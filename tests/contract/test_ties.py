"""Tensors that are stored and tied at once: every family is seen as transformers' own class loads it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.evaluation.whole_model import load_reported
from ckpt_prune.model.containers.checking import check_source
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names

from .models import CASES, Case
from .whole import outputs

TIED = '{"tie_word_embeddings": true}'
HEADS = {"llama", "gpt2", "gpt_neox", "bert", "opt", "distilbert", "deepseek_v3"}
"""Heads by three names, one whose name on disk is another, a bias that is tied too and one that is not, experts."""
FAMILIES = [
    Case(case.model_type, case.architecture, settings=TIED)
    for case in CASES
    if case.variant is None and case.model_type in HEADS and case.described.head
]


def write_model(plain: Path, out: Path, tensors: dict[str, torch.Tensor], **values: bool) -> Path:
    """A model's folder with other tensors and config values."""
    shutil.copytree(plain, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | values))
    return out


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_what_is_stored_and_tied_is_seen_as_the_class_loads_it(case: Case, tmp_path) -> None:
    """An equal copy, a head alone, and another head: each as a checkpoint that says the same plainly."""
    plain, names = case.write(tmp_path / "plain"), Names(case.model())
    tensors = load_file(plain / "model.safetensors")
    ties = {names.saved_as(tied): names.saved_as(source) for tied, source in names.ties.items()}
    copies = {tied: tensors[source].clone() for tied, source in ties.items()}
    head = f"{case.described.head}.weight"
    other = {head: copies[head].flip(0)}
    alone = {name: tensor for name, tensor in tensors.items() if name not in ties.values()}
    apart = write_model(plain, tmp_path / "apart", tensors | copies | other, tie_word_embeddings=False)
    for name, stored, same in (
        ("copy", tensors | copies, plain),
        ("alone", alone | copies, plain),
        ("other", tensors | other, apart),
    ):
        folder = write_model(plain, tmp_path / name, stored)
        seen, expected = Model.open(folder), Model.open(same)
        check_source(seen)
        assert seen.tied is expected.tied is (same is plain)
        ours, theirs = (model.checkpoint.read(sorted(model.checkpoint.tensors)) for model in (seen, expected))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert cost_of(seen) == cost_of(expected)
        assert seen.checkpoint.fingerprint == Checkpoint.open(folder).fingerprint
        loaded = [outputs(load_reported(source)[0], case.samples(2)) for source in (folder, same)]
        assert all(torch.equal(loaded[0][key], loaded[1][key]) for key in loaded[0])
