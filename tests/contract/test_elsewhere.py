"""Outputs whose shape no stock class has carry code of their own: the same model where this package is missing."""

import json
from pathlib import Path

import pytest
import torch

import ckpt_prune
from ckpt_prune.verification.verify import verify
from tests.once import once, run_folder
from tests.stored import run_elsewhere

from .dense import Dense, spaces_recipe
from .models import BLOCKS, Case, unlike_cases
from .whole import assert_same_outputs, outputs, wide

ELSEWHERE = """
import json, sys, torch, transformers
sys.modules["ckpt_prune"] = None  # whoever imports it fails
for folder, auto in json.loads(sys.argv[1]):
    batch = torch.load(folder + ".in")
    loader = getattr(transformers, auto)
    model, info = loader.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), (folder, info)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    text = None
    if auto == "AutoModelForCausalLM":
        text = model.eval().generate(batch["input_ids"][:1, :6], max_new_tokens=4, do_sample=False, eos_token_id=None)
    torch.save(text, folder + ".text")
    options = {"use_cache": False} if hasattr(model, "generate") else {}
    for module in model.modules():
        if hasattr(module, "is_concatenated"):  # experts, whose default implementation has no float64
            module.config._experts_implementation = "eager"
    with torch.inference_mode():
        out = model.eval().double()(**batch, **options)
    torch.save({k: v for k, v in out.items() if isinstance(v, torch.Tensor)}, folder + ".out")
    # Saved again it still loads, with the code beside it.
    model.float().save_pretrained(folder + ".saved")
    again = loader.from_pretrained(folder + ".saved", trust_remote_code=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    try:
        loader.from_pretrained(folder + ".saved")
    except ValueError as error:
        assert "this class would misread a model that ckpt_prune has pruned" in str(error), error
    else:
        raise AssertionError("a stock class read it")
"""

pytestmark = pytest.mark.thorough  # `tests/model/containers/test_remote.py` runs the code of some families every time


@pytest.fixture(scope="module")
def remote(dense: Dense, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of the cases that are asked for, one after the other run in a Python without this package."""
    items = [item for item in request.session.items if item.module is request.module]
    requested = sorted({item.callspec.params["case"] for item in items}, key=str)

    def make(root: Path) -> Path:
        folders = []
        for case in requested:
            report = dense.prune(case, spaces_recipe(case, methods(case), "remote"), root / str(case))
            assert report["container"]["remote_code"]
            torch.save(wide(case.samples(3, seed=9)), root / f"{case}.in")
            folders.append((str(root / str(case)), case.family.auto_class))
        run_elsewhere(ELSEWHERE, json.dumps(folders), root=root)
        return root

    return once(run_folder(tmp_path_factory) / "contract-elsewhere", make)


PAIRED = ("llama", "cohere")
"""Families that lose rotary pairs, too: one of each layout."""


def methods(case: Case) -> dict[str, str]:
    """With a bias for every consumer, whether its class has a slot or not; experts have none."""
    chosen = {space: "logit" if space in case.family.logits else "affine" for space in case.ratios}
    chosen |= {"mlp": "ridge"} if case.family.experts is not None else {}
    return chosen | ({"rotary": "factors"} if case.model_type in PAIRED else {})


@pytest.mark.parametrize("case", unlike_cases(), ids=str)
def test_the_same_outputs_with_and_without_this_package(dense: Dense, remote: Path, case: Case) -> None:
    folder = remote / str(case)
    model, samples = ckpt_prune.load(folder), case.samples(3, seed=9)
    text = torch.load(f"{folder}.text")
    assert (text is None) is (case.family.auto_class != "AutoModelForCausalLM")
    if text is not None:
        prompt = samples.batch(slice(1))["input_ids"][:, :6]
        assert torch.equal(text, model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None))
    here = outputs(model, samples)
    assert_same_outputs(torch.load(f"{folder}.out"), here, 1e-9)
    for check in verify(folder, dense.folder(case)):
        assert check.passed or check.name == "sparsity", check


@pytest.mark.parametrize("case", unlike_cases()[::6], ids=str)
def test_an_output_of_an_earlier_version_is_loaded(remote: Path, case: Case, tmp_path) -> None:
    """Its config says nothing of its blocks: the code that it carries did."""
    folder = remote / str(case)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("ckpt_prune_blocks")["layers"] == case.family.layers
    del config["transformers_weights"]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, original = ckpt_prune.load(tmp_path), ckpt_prune.load(folder)
    assert type(loaded) is type(original)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))
    assert len(loaded.get_submodule(case.family.layers)) == BLOCKS
