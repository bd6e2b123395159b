"""`recover --method lora`: adapters on the whole model, merged into what the report says they are."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.text import load_tokenizer, mix_windows, read_text, tokenise_text
from ckpt_prune.stages.recovery import run_afterwards
from ckpt_prune.stages.recovery.training import SampleSplit
from tests.cli.running import TEXT, changed, edit_weights, ok, read_refusal, run
from tests.cli.test_recover import find_changed, linears, report_of, tensors
from tests.images import write_csv, write_images, write_vit

LORA = ("--method", "lora", *changed(TEXT, "--samples", "32"), "--epochs", "3", "--lr", "0.02", "--batch", "8")


def held_out_loss(folder: str) -> float:
    """Compute the mean loss per token of a folder, loaded as anybody loads it, on the windows that are held out."""
    stream = tokenise_text(load_tokenizer(Path(folder)), read_text([Path("calib.txt")]), bos="auto")
    windows = mix_windows([stream], samples=32, window=16, seed=0, choose="random")[0]
    windows = windows[SampleSplit.of(len(windows), 0.1).measured]
    with torch.no_grad():
        logits = ckpt_prune.load(folder, dtype=torch.float32)(windows).logits
    losses = [cross_entropy(logits[w, t], windows[w, t + 1]) for w in range(len(windows)) for t in range(15)]
    return float(torch.stack(losses).mean())


def test_zeros_stay_and_the_stored_model_has_the_loss_that_is_said(place: Path):
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    result = run("recover", "masked", *LORA, "--evaluate-samples", "0", "-o", "out")
    assert result.exit_code == 0, result.output
    lora = report_of("out")["adapters"]
    assert lora["loss_before"] == pytest.approx(held_out_loss("masked"), rel=1e-4)
    assert lora["loss_after"] == pytest.approx(held_out_loss("out"), rel=1e-4)
    assert lora["loss_after"] < lora["loss_before"] - 0.05
    assert find_changed("out", "masked") == linears(0, 1)
    ours, theirs = tensors("out"), tensors("masked")
    for name in linears(0, 1):
        assert ((ours[name] == 0) == (theirs[name] == 0)).all(), name
    assert result.stdout.splitlines() == [
        "LoRA",
        f"  Recovered by LoRA of rank 8 on 14 linear modules, merged; 29 samples, 3 epochs ({lora['steps']} steps), "
        f"{lora['parameters']} parameters; zeros stay zero.",
        f"  Loss on 3 held-out samples: {lora['loss_before']:.4f} → {lora['loss_after']:.4f}.",
        "written to out",
    ]
    assert result.stderr.startswith("LoRA holds the whole model, ")
    assert result.stderr.count("\n") == 1
    assert "linear modules are the dense ones, bit for bit" in ok("verify", "out", "--against", "dense")
    card = Path("out/README.md").read_text()
    assert f"Recovered by LoRA of rank 8 on 14 linear modules, merged; 29 samples, {lora['epochs']:.3g} epochs" in card
    assert report_of("out")["recipe"]["name"] == "magnitude-50"


def test_where_nothing_is_gained_weights_stay(place: Path):
    done = run("recover", "pruned", *LORA[:-4], "--lr", "100000", "--patience", "1", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "no epoch was better than the model as it was, at lr 100000: the weights stay as they are" in done.stderr
    assert find_changed("out") == set()
    lora = report_of("out")["adapters"]
    assert (lora["modules"], lora["loss_after"]) == (0, lora["loss_before"])


def test_a_classifier_learns_its_classes(tmp_path: Path):
    write_vit(Path("vit"))
    names = [f"{index}.png" for index in range(12)]
    write_images(Path("pictures"), names)
    images = ("--method", "lora", "--images", "pictures", "--epochs", "6", "--lr", "0.005", "--held-out", "0.25")
    assert read_refusal("recover", "vit", *images, "-o", "out") == (
        "--method lora needs the images' classes: give --labels FILE or a sub-folder per class"
    )
    write_csv(Path("pictures/labels.csv"), "file,label", *(f"{name},1" for name in names))
    ok("recover", "vit", *images, "-o", "out")
    lora = report_of("out")["adapters"]
    assert (lora["window"], lora["samples"]) == (None, 12)
    assert lora["loss_after"] < lora["loss_before"]
    assert report_of("out")["recipe"]["name"] == "pruned elsewhere"
    model = ckpt_prune.load("out", dtype=torch.float32)
    pixels = {
        "pixel_values": load_processor(Path("out"))(Image.open("pictures/0.png"), return_tensors="pt")["pixel_values"]
    }
    dense = ckpt_prune.load("vit", dtype=torch.float32)
    with torch.no_grad():
        chances = [classifier(**pixels).logits.softmax(-1)[0, 1] for classifier in (model, dense)]
    assert chances[0] > chances[1]


def test_without_peft_it_says_which_extra(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert (
        read_refusal("recover", "pruned", *LORA, "-o", "out")
        == 'peft is not installed: pip install ".[lora]" in the checkout of ckpt-prune'
    )


def test_a_source_that_changes_while_adapters_are_trained_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch):
    """A source that changes during training is refused: adapters were once written beside weights they do not fit."""
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    train = run_afterwards.train_adapters

    def train_then_edit_source(*given: Any, **more: Any) -> Any:
        adapted = train(*given, **more)
        edit_weights("masked", lambda tensors: tensors["lm_head.weight"].mul_(2))
        return adapted

    monkeypatch.setattr(run_afterwards, "train_adapters", train_then_edit_source)
    result = run("recover", "masked", *changed(LORA, "--epochs", "1"), "-o", "out")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "Error: masked/model.safetensors changed since it was opened; run again"
    assert not Path("out").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_the_adapter_by_itself_makes_of_the_pruned_model_what_was_merged(place: Path, monkeypatch: pytest.MonkeyPatch):
    """In peft, on code of the output's own; and `convert` merges it to the same bytes."""
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # peft asks the Hub for a tokenizer beside the adapter
    widths = ("--set", "widths=per_layer", "--set", "allocation=across-layers")
    ok("prune", "dense", "--recipe", "magnitude", "--ratio", "0.4", *widths, "-o", "own")
    assert Path("own/modeling_pruned.py").is_file()
    output = ok("recover", "own", *LORA, "--only", "mlp", "--keep-adapter", "-o", "out")
    sentence = "The adapter by itself is in adapter: peft.PeftModel.from_pretrained puts it on the recovered model."
    assert sentence in output
    assert sentence in Path("out/README.md").read_text()
    assert sorted(path.name for path in Path("out/adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert set(report_of("out")["files"]) >= {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    # In float64 nothing is left between both but that merged weights are rounded to float32.
    trust = {"trust_remote_code": True, "dtype": torch.float64}
    windows = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), quiet_transformers():
        adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("own", **trust), "out/adapter")
        by_name = peft.AutoPeftModelForCausalLM.from_pretrained("out/adapter", **trust)
        merged, before = (AutoModelForCausalLM.from_pretrained(folder, **trust) for folder in ("out", "own"))
        ours, theirs, named, old = (model.eval()(windows).logits for model in (merged, adapted, by_name, before))
    effect = (ours - old).abs().max()
    assert effect > 0.05
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * float(effect))
    assert torch.equal(named, theirs)
    ok("convert", "out/adapter", "-o", "converted")
    for name, weight in tensors("out").items():
        torch.testing.assert_close(tensors("converted")[name], weight, rtol=0, atol=1e-6)


def test_no_adapter_is_kept_where_nothing_is_gained_or_nobody_asks(place: Path):
    ok("recover", "pruned", *changed(LORA, "--epochs", "1"), "-o", "plain")
    done = run("recover", "pruned", *LORA[:-4], "--lr", "100000", "--patience", "1", "--keep-adapter", "-o", "out")
    assert done.exit_code == 0, done.output
    for out in ("plain", "out"):
        assert not Path(out, "adapter").exists()
        assert "The adapter by itself" not in Path(out, "README.md").read_text()
    assert read_refusal("recover", "pruned", "--dense", "dense", *TEXT, "--keep-adapter", "-o", "scaled") == (
        "--keep-adapter is for --method lora"
    )


def test_an_adapter_that_fills_zeros_says_so_and_goes_with_its_output(place: Path):
    ok("prune", "dense", "--recipe", "magnitude-50", "-o", "masked")
    stderr = run("recover", "masked", *LORA, "--keep-adapter", "-o", "out").stderr
    assert "zeros of a mask stay in the merged weights; the adapter by itself would fill them\n" in stderr
    ok("recover", "pruned", *changed(LORA, "--epochs", "1"), "--overwrite", "-o", "out")
    assert not Path("out/adapter").exists()
    ok("recover", "pruned", *changed(LORA, "--epochs", "1"), "--keep-adapter", "--overwrite", "-o", "out")
    ok("prune", "out", "--recipe", "magnitude", "--ratio", "0.2", "-o", "again")
    assert not Path("again/adapter").exists()
    assert "The adapter by itself" not in Path("again/README.md").read_text()


def test_an_adapter_of_a_model_on_the_hub_names_its_commit(tmp_path: Path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert run_afterwards.base_of(snapshot) == {"base_model_name_or_path": "org/name", "revision": "0123abc"}
    assert run_afterwards.base_of(tmp_path) == {"base_model_name_or_path": str(tmp_path)}
