"""CORP on a vision transformer and OPT from the command line: from images to a report, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import (
    changed,
    edit_weights,
    enter_copy,
    ok,
    read_json,
    read_refusal,
    run,
    same_files,
    set_config,
)
from tests.encoders import make
from tests.images import write_csv, write_images, write_vit

IMAGES = ("--images", "images", "--samples", "12")


@pytest.fixture(scope="module")
def corp(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corp")
    with quiet_transformers():
        make(folder / "vit", "vit")
        make(folder / "opt", "opt")
        write_vit(folder / "small")  # two heads of eight dimensions, five tokens
    write_images(folder / "images", [f"{i:02}.png" for i in range(12)])
    for name in ("dense", "stats"):
        shutil.copytree(made / name, folder / ("llama" if name == "dense" else "llama-stats"))
    shutil.copy(made / "calib.txt", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ok("calibrate", "vit", *IMAGES, "-o", "stats")
        ok("prune", "vit", "--recipe", "corp", "--statistics", "stats", "-o", "pruned")
    return folder


@pytest.fixture
def here(corp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `vit`, `opt`, `small`, `llama`, `images`, `calib.txt`, `stats` and `pruned` of its own."""
    return enter_copy(corp, tmp_path, monkeypatch)


# ---- what works ----------------------------------------------------------------------------------------------------


def test_from_images_to_a_report(here):
    output = ok("calibrate", "vit", *IMAGES, "--folds", "3", "-o", "folded")
    assert output.startswith(
        "folded: 12 images of 10 tokens, 3 blocks, moments+gram+logits+linears+fisher+effects, folds 3, "
    )
    lines = ok("plan", "vit", "--recipe", "corp", "--statistics", "folded", "-o", "plan.json").splitlines()
    assert lines[3].split()[:3] == ["FLOPs", "/", "10"]
    rows = [line.split() for line in lines[6:12]]
    assert [row[:5] for row in rows] == [
        [str(block), *site]
        for block in range(3)
        for site in (["qk", "8/16", "logit", "0.001"], ["mlp", "11/22", "affine", "0.001"])
    ]
    for row in rows:
        before, after, floor, rho2, held_out = map(float, row[5:])
        assert floor <= after < before
        assert 0 < rho2 <= 1
        assert held_out > after
    assert "kept per block: qk 2/4 (ratio 0.5), mlp 11/22 (ratio 0.5)" in lines
    note = "stored as vit with remote code (no stock class has queries and keys narrower than values)"
    assert any(line.startswith(note) for line in lines)
    assert "errors are of each site's output, no perplexity or accuracy" in lines  # a llama's are no yardstick here

    output = ok("prune", "vit", "--plan", "plan.json", "-o", "out")
    assert "written to out" in output
    assert note in output
    checks = json.loads(ok("verify", "out", "--against", "vit", "--json"))
    assert checks["passed"]
    assert {c["name"]: c["passed"] for c in checks["checks"]} == dict.fromkeys(
        ("tensors", "finite", "load", "digests", "kept units"), True
    ) | {"sparsity": None}
    assert ok("report", "out") == "report written to out.report.html\n"
    assert "qk" in Path("out.report.html").read_text()
    model = ckpt_prune.load("out")
    assert type(model).__name__ == "PrunedViTForImageClassification"
    report = read_json("out/ckpt_prune.json")
    assert report["calibration"]["modality"] == "image"
    assert report["after"]["parameters"] == model.num_parameters()
    assert report["container"] == {
        "model_type": "vit",
        "remote_code": True,
        "auto_class": "AutoModelForImageClassification",
        "padded": [],
        "note": f"{note}: load with ckpt_prune.load or trust_remote_code",
    }
    assert "modeling_pruned.py" in {path.name for path in Path("out").iterdir()}
    assert (Path("out") / "preprocessor_config.json").read_bytes() == Path("vit/preprocessor_config.json").read_bytes()
    assert "modality image, " in Path("out/README.md").read_text()


def test_images_of_two_folders(here):
    """As many of each, as in Table 8; the same ones by statistics of them, and others to measure on."""
    write_images(here / "more", [f"{i:02}.png" for i in range(8)])
    both = ("--images", "images", "--images", "more", "--samples", "12")
    ok("calibrate", "vit", *both, "-o", "both")
    ok("prune", "vit", "--recipe", "corp", "--statistics", "both", "-o", "cached")
    output = ok("prune", "vit", "--recipe", "corp", *both, "-o", "live")
    assert weights("cached") == weights("live") != weights("pruned")
    assert "8 images of images, more that it was not calibrated on" in output
    assert (
        read_refusal("calibrate", "vit", *both, "--images", "more", "-o", "out") == "--images more: it is named twice"
    )


def weights(folder: str) -> bytes:
    return (Path(folder) / "model.safetensors").read_bytes()


def test_centred_keys(here):
    """Measured on request or by a recipe that is given images; nothing else reads them."""
    output = ok("calibrate", "vit", *IMAGES, "--collect", "moments,logits,centred", "-o", "centred")
    assert output.startswith("centred: 12 images of 10 tokens, 3 blocks, moments+logits+centred, folds 1, ")
    low_rank = ("--recipe", "corp-qk-low-rank")
    centre = ("--set", "spaces.qk.compensation.centre_keys=true")
    ok("prune", "vit", *low_rank, *centre, "--statistics", "centred", "-o", "cached")
    ok("prune", "vit", *low_rank, *centre, *IMAGES, "--evaluate-samples", "0", "-o", "live")
    assert same_files("cached", "live")
    ok("prune", "vit", *low_rank, "--statistics", "centred", "-o", "plain")
    ok("prune", "vit", *low_rank, "--statistics", "stats", "-o", "from-stats")
    assert weights("plain") == weights("from-stats") != weights("cached")
    ok("prune", "vit", *low_rank, *centre, "--set", "target=sequential", *IMAGES, "-o", "sequential")
    errors = [
        [site["error_compensated"] for site in read_json(f"{out}/ckpt_prune.json")["sites"]]
        for out in ("cached", "sequential")
    ]
    assert errors[0][0] == pytest.approx(errors[1][0], rel=1e-3)  # nothing is pruned before the first block
    assert errors[0][1] != errors[1][1]


def test_verify_looks_inside_padding(here):
    """Rows of q and k without compensation are the dense ones at their places."""
    none = ("--set", "spaces.qk.compensation={method: none}")
    ok(
        *("prune", "vit", "--recipe", "corp-qk", *none, "--statistics", "stats"),
        *("--container", "padded", "-o", "out"),
    )
    assert json.loads(ok("verify", "out", "--against", "vit", "--json"))["passed"]
    kept = read_json("out/ckpt_prune.json")["sites"][2]["kept"][0]

    def change(tensors):
        tensors["vit.encoder.layer.2.attention.attention.key.bias"][kept] += 1

    edit_weights("out", change)
    result = run("verify", "out", "--against", "vit", "--json")
    checks = {c["name"]: c["passed"] for c in json.loads(result.stdout)["checks"]}
    assert (result.exit_code, checks["kept units"]) == (1, False)


def test_a_split_takes_its_calibration_rows(here):
    rows = [f"{i:02}.png,0,{'calib' if i < 5 else 'eval'}" for i in range(12)]
    write_csv(Path("images/labels.csv"), "file,label,split", *rows)
    summary = json.loads(ok("calibrate", "vit", "--images", "images", "-o", "split", "--json"))
    assert (summary["samples"], summary["modality"], summary["window"]) == (5, "image", 10)
    more = run("calibrate", "vit", "--images", "images", "--samples", "6", "-o", "more")
    assert more.stderr.splitlines()[0] == "images has 5 images to calibrate on: all are used, not 6"


def test_images_that_do_not_decode_are_counted_and_named(here):
    Path("images/03.png").write_bytes(b"no image")
    arguments = ("calibrate", "vit", "--images", "images", "-o", "out")
    assert read_refusal(*arguments).startswith("1 of 12 images do not decode, more than the allowed share of 0.05; ")
    result = run(*arguments, "--max-corrupt", "0.1")
    assert result.exit_code == 0
    assert "1 of 12 images do not decode and are left out: images/03.png" in result.stderr
    assert "out: 11 images of 10 tokens" in result.stdout


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_lambda_zero_with_too_few_samples(here):
    """6 of 8 dimensions: 36 unknowns, of which an image of five tokens settles 25 at most."""
    bare = ("--recipe", "corp-qk", "--ratio", "0.25", "--set", "spaces.qk.compensation.lambda=0")
    low_rank = (*bare, "--set", "spaces.qk.compensation.method=low-rank")
    assert read_refusal("prune", "small", *low_rank, "--images", "images", "--samples", "1", "-o", "out") == (
        "low-rank with lambda 0 needs at least 2 images for the 8 x 6 unknowns of a head, and there are 1: give more, "
        "or a lambda above 0"
    )
    message = (
        "logit with lambda 0 needs at least 2 images for the 6 x 6 unknowns of a head, and there are 1: "
        "give more, or a lambda above 0"
    )
    assert read_refusal("prune", "small", *bare, "--images", "images", "--samples", "1", "-o", "out") == message
    ok("calibrate", "small", "--images", "images", "--samples", "1", "-o", "one")
    assert read_refusal("prune", "small", *bare, "--statistics", "one", "-o", "out") == message
    assert read_refusal("plan", "small", *bare, "--statistics", "one") == message
    ok("prune", "small", "--recipe", "corp-qk", "--ratio", "0.25", "--statistics", "one", "-o", "shrunk")
    ok("prune", "small", *bare, "--images", "images", "--samples", "2", "-o", "two")


def test_a_processor_of_another_size(here):
    config = read_json("vit/preprocessor_config.json")
    config["size"] = {"height": 8, "width": 8}
    Path("vit/preprocessor_config.json").write_text(json.dumps(config))
    result = run("calibrate", "vit", *IMAGES, "-o", "out")
    assert result.exit_code == 2
    message = result.stderr.splitlines()[-1]
    assert message == (
        "Error: the model refuses its calibration data: Input image size (8*8) doesn't match model (12*12); the "
        "tokenizer or preprocessor_config.json in its folder may belong to another model"
    )
    assert not Path("out").exists()


def test_statistics_of_another_processor(here):
    config = read_json("vit/preprocessor_config.json")
    Path("vit/preprocessor_config.json").write_text(json.dumps(config | {"image_mean": [0.1, 0.1, 0.1]}))
    message = read_refusal("prune", "vit", "--recipe", "corp", "--statistics", "stats", "-o", "out")
    assert "processor" in message


def test_an_input_that_asks_for_code_of_its_own(here):
    """Refused by every command that measures or prunes; with trust the stock class is used, and no code runs."""
    Path("vit/their_code.py").write_text("raise SystemExit('run')\n")
    name = "AutoModelForImageClassification"
    set_config("vit", auto_map={name: "their_code.Model"})
    message = (
        "vit asks for remote code that is not this tool's (auto_map in config.json): it is not run; "
        "where you have read and trust it, say --trust-remote-code"
    )
    assert read_refusal("calibrate", "vit", *IMAGES, "-o", "out") == message
    assert read_refusal("prune", "vit", "--recipe", "corp", *IMAGES, "-o", "out") == message
    assert read_refusal("plan", "vit", "--recipe", "magnitude") == message
    trust = "--trust-remote-code"
    ok("calibrate", "vit", *IMAGES, trust, "-o", "measured")
    ok("plan", "vit", "--recipe", "corp", "--statistics", "measured", trust, "-o", "plan.json")
    ok("prune", "vit", "--plan", "plan.json", trust, "-o", "out")
    ok("prune", "vit", "--recipe", "corp-mlp", *IMAGES, trust, "-o", "live")
    assert not Path("out/their_code.py").exists()
    assert read_json("out/config.json")["auto_map"] == {
        name: "modeling_pruned.PrunedViTForImageClassification",
        "AutoModel": "modeling_pruned.PrunedViTModel",
    }
    assert "auto_map" not in read_json("live/config.json")
    assert "warnings" not in read_json("live/ckpt_prune.json")  # its own lambda is enough for ten tokens an input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: [*kept[:-1], next(row for row in range(4) if row not in kept)], "keeps different numbers of "),
        (lambda kept: kept[:-2], "keeps different numbers of units of qk side by side in block 0"),
        (lambda kept: [*kept[:-1], 16], "the plan's kept units of qk in block 0 are not ascending indices below 16"),
    ],
    ids=["uneven heads", "a head left out", "a row that is not there"],
)
def test_an_edited_plan_is_refused(here, change, message):
    ok("plan", "vit", "--recipe", "corp", "--statistics", "stats", "-o", "plan.json")
    plan = read_json("plan.json")
    plan["sites"][0]["kept"] = sorted(change(plan["sites"][0]["kept"]))
    Path("plan.json").write_text(json.dumps(plan))
    assert message in read_refusal("prune", "vit", "--plan", "plan.json", "-o", "out")


def test_a_ranking_over_blocks_with_lambda_0_and_images(here):
    ranked = ["--recipe", "flap-global", "--set", "spaces.mlp.compensation.method=ridge"]
    ranked += ["--set", "spaces.mlp.compensation.lambda=0", *IMAGES]
    ok("prune", "vit", *ranked, "-o", "out")
    assert read_refusal("prune", "small", *changed(ranked, "--samples", "1"), "-o", "more").startswith(
        "ridge with lambda 0 needs at least "
    )


def test_an_output_with_remote_code_that_lost_a_tensor_is_not_measured(here):
    edit_weights("pruned", lambda tensors: tensors.pop("vit.encoder.layer.1.attention.attention.query.weight"))
    message = read_refusal("evaluate", "pruned", "--against", "vit", "--images", "images")
    assert message.startswith("pruned: tensors are missing or of the wrong shape: vit.")
