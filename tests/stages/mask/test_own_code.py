"""Masks in outputs that carry code of their own: narrower values, rotary pairs, narrower q and k, uneven blocks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ckpt_prune
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.choose import choose_samples
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.model import Model
from ckpt_prune.options.commands import CalibrateOptions
from tests import encoders
from tests.cli.running import TEXT, enter_copy, interrupt_job, ok, read_json, read_refusal, resume_job, run
from tests.images import write_images, write_vit
from tests.pairs import dealt

BUDGET = """\
version: 1
name: budget
allocation: least-error
widths: per_layer
container: any
size: {params: 60%}
spaces:
  queries: {score: auto, compensation: {method: ridge}}
  values: {score: principal, multiple_of: 2, compensation: {method: ridge}}
  rotary: {score: obs, compensation: {method: factors, lambda: 0.01}}
  mlp: {score: auto, multiple_of: 4, compensation: {method: ridge}}
"""
"""Queries, values, pairs and columns of a llama, as many as each block can spare."""
IMAGES = ("--images", "images", "--samples", "8")
DATA = {"llama": TEXT, "opt": TEXT, "vit": IMAGES}
REFUSED = "{} was pruned into a shape that no stock class has (remote code): {}; start from the dense model"


@pytest.fixture(scope="module")
def outputs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output of each family, under its name, beside what it was made from."""
    folder = tmp_path_factory.mktemp("again")
    with quiet_transformers():
        encoders.make(folder / "dense-opt", "opt")
        write_vit(folder / "dense-vit")
    write_images(folder / "images", [f"{i:02}.png" for i in range(8)])
    shutil.copytree(made / "dense", folder / "dense-llama")
    shutil.copy(made / "calib.txt", folder)
    (folder / "budget.yaml").write_text(BUDGET)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ok("prune", "dense-llama", "--recipe", "budget.yaml", *TEXT, "-o", "llama")
        ok("prune", "dense-opt", "--recipe", "corp", "--ratio", "0.5", *TEXT, "-o", "opt")
        ok("prune", "dense-vit", "--recipe", "corp-qk", "--ratio", "0.5", *IMAGES, "-o", "vit")
    return folder


@pytest.fixture
def here(outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with them."""
    return enter_copy(outputs, tmp_path, monkeypatch)


def weights(folder: str) -> dict[str, Tensor]:
    """Tensors on disk."""
    return load_file(f"{folder}/model.safetensors")


def masked_weights(folder: str) -> list[str]:
    """Weights that its report says are masked."""
    return [linear["weight"] for linear in read_json(f"{folder}/ckpt_prune.json")["linears"]]


def inputs(folder: str, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over tokens of the squares of what reaches every linear module, float64, in the model as it is loaded."""
    model = ckpt_prune.load(folder).double()
    sums: dict[str, Tensor] = {}

    def see(name: str, given: Tensor) -> None:
        squares = given.detach().flatten(0, -2).square().sum(0)
        sums[name] = sums.get(name, 0) + squares

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            # Behind what takes zeros off narrow values.
            module.register_forward_pre_hook(lambda _m, args, name=name: see(name, args[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    return sums


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_zeros_are_those_that_the_whole_model_says(here, family):
    """Wanda's score by inputs of the loaded output; statistics and what is measured at once give the same bytes."""
    ok("calibrate", family, *DATA[family], "--compute-dtype", "float32", "-o", "stats")
    ok("prune", family, "--recipe", "wanda-50", "--statistics", "stats", "-o", "out")
    at_once = ("--set", "target=dense", "--compute-dtype", "float32")
    ok("prune", family, "--recipe", "wanda-50", *DATA[family], *at_once, "-o", "live")
    before, after = weights(family), weights("out")
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert all(torch.equal(after[name], other) for name, other in weights("live").items())
    assert read_json("out/config.json") == read_json(f"{family}/config.json")
    assert (Path("out") / "modeling_pruned.py").is_file()
    squares, names = inputs(family, _batches(family)), stored_container(Checkpoint.open(family)).names()
    for name in masked_weights("out"):
        weight = before[name].double()
        (parameter,) = names.parameters(name)
        scores = weight.abs() * squares[parameter.removesuffix(".weight")].sqrt()
        gone = scores.argsort(dim=1, stable=True)[:, : weight.shape[1] // 2]
        expected = weight.scatter(1, gone, 0.0).to(before[name].dtype)
        assert torch.equal(after[name], expected), name
    for check in json.loads(ok("verify", "out", "--against", family, "--json"))["checks"]:
        assert check["passed"] is not False, check


def _batches(family: str) -> list[dict[str, Tensor]]:
    given = dict(zip(("images",) if family == "vit" else ("text",), [DATA[family][1]], strict=True))
    sizes = {"samples": 8, **({} if family == "vit" else {"window": 16})}
    options = CalibrateOptions(model=family, output="unused", **given, **sizes)
    samples = choose_samples(Model.open(family), options, say=lambda _: None)
    return [{name: t.double() if t.is_floating_point() else t for name, t in samples.batch(slice(0, 8)).items()}]


@pytest.mark.parametrize(("recipe", "family"), dealt(["sparsegpt-2-4", "magnitude-50"], ["llama", "opt"]))
def test_every_pattern_goes_in_and_comes_back(here, family, recipe):
    """Measured on the masked prefix, interrupted, checked, loaded and trained."""
    job = ["prune", family, "--recipe", recipe, *TEXT]
    ok(*job, "-o", "whole")
    interrupt_job(job, 2)
    resume_job(job)
    shares = [
        float((tensor == 0).double().mean())
        for name, tensor in weights("whole").items()
        if name in masked_weights("whole")
    ]
    assert all(share >= 0.4 for share in shares)
    ok("verify", "whole", "--against", family)
    ok("recover", "whole", "--dense", f"dense-{family}", *TEXT, "--epochs", "1", "-o", "recovered")
    trained, zeros = weights("recovered"), weights("whole")
    assert all(not trained[name][zeros[name] == 0].any() for name in masked_weights("whole"))


def test_stock_classes_refuse_what_is_made_of_an_output_of_an_earlier_version(here):
    """An output of an earlier version lacks the entry by which stock classes refuse it; what is made of it has one."""
    path = Path("opt/config.json")
    config = read_json(path)
    sentence = config.pop("transformers_weights")
    path.write_text(json.dumps(config))
    assert "a former version wrote it, and stock classes that its shapes fit misread it" in run("verify", "opt").stdout
    ok("prune", "opt", "--recipe", "magnitude-50", "-o", "out")
    assert "a former version" not in ok("verify", "out")
    assert read_json("out/config.json") == config | {"transformers_weights": sentence}
    ok("recover", "opt", "--dense", "dense-opt", *TEXT, "--epochs", "1", "-o", "recovered")
    assert read_json("recovered/config.json") == config | {"transformers_weights": sentence}


# ---- what is refused ---------------------------------------------------------------------------------------------

UNITS = "units are counted alike in every block, and its blocks may differ"


def test_what_is_refused(here):
    masks = f"{UNITS}; masks alone go into it"
    for given in (("magnitude",), ("depth", *TEXT), ("values", *TEXT)):
        assert read_refusal("prune", "llama", "--recipe", *given, "-o", "out") == REFUSED.format("llama", masks)
    rotating = ("prune", "llama", "--recipe", "cayley-rotator-shared-wanda-50", *TEXT, "-o", "out")
    assert read_refusal(*rotating) == REFUSED.format(
        "llama", "rotations are absorbed by blocks of the stock shape; masks without them go into it"
    )
    assert read_refusal("inspect", "llama", "--ratio", "0.5") == REFUSED.format("llama", UNITS)
    message = read_refusal("calibrate", "llama", *TEXT, "--collect", "moments,fisher", "-o", "s")
    assert message.endswith(": choose from moments,gram,linears (mistral with code of its own)")
    assert read_refusal("recover", "dense-llama", "--dense", "llama", *TEXT, "-o", "out") == REFUSED.format(
        "llama", "no other model is held against it"
    )
