"""Golden hashes: what every shipped recipe makes of five small models, to the byte.

    PYTHONPATH=. python tools/golden.py hashes.json                       # prune all, write their hashes
    PYTHONPATH=. python tools/golden.py --check hashes.json               # prune all, name each difference
    PYTHONPATH=. python tools/golden.py --check hashes.json --only 'ridge/*' --only '*/opt'

One model is carried by the package (bfloat16, trained). Four are made here from a fixed seed, in float32: a Llama, an
OPT, a ViT and a Mixtral. Nothing outside the repository is needed. Hashed are config.json and
every tensor: its name, dtype, shape and bytes. Where a recipe refuses a model, its words are kept, and the model is
tried once more with `container=any`. Recipes that train or learn for long do so for a few steps (`SHORTER`).
Bytes depend on the processor and on the versions of torch and transformers. So hashes are kept beside the checkout, not
in it, and are not compared with those of another machine unless `--force` says so.
"""

import argparse
import hashlib
import json
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
import yaml
from PIL import Image
from safetensors import safe_open
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

import ckpt_prune as cp
from ckpt_prune.recipe.shipped import RecipeFile, recipe_text, shipped_recipes
from ckpt_prune.stages import FullRecipe

Hashes = dict[str, dict[str, str]]
"""RECIPE/MODEL → file or tensor → hash; or "refused" → the message."""

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / "ckpt_prune" / "demo" / "model"
RATIO = 0.3
"""Where a recipe says none: of four heads one goes."""
SHORTER: dict[str, Mapping[str, object]] = {"rotation": {"rotation.steps": 5}, "recovery": {"recovery.epochs": 1}}
"""Key of a recipe → what is overridden."""
WORDS = "the of to block weight prune head mask scale rank norm value query key width depth error small model layer"
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "initializer_range": 0.2}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 32, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1}
LLAMA: dict[str, Any] = {**TEXT, "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 96}


def environment() -> dict[str, str]:
    """Return what the bytes depend on."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def make_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the models and what they are calibrated on; returned are the arguments of `ckpt_prune.prune` for each."""
    draw = random.Random(0)
    text, images = folder / "calib.txt", folder / "images"
    text.write_text("\n".join(" ".join(draw.choices(WORDS.split(), k=12)) for _ in range(400)), encoding="utf-8")
    images.mkdir()
    for number in range(24):
        Image.frombytes("RGB", (16, 16), draw.randbytes(3 * 16 * 16)).save(images / f"{number:02}.png")

    opt = {**TEXT, "num_hidden_layers": 3, "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 2}
    vit = {**SIZES, "num_hidden_layers": 3, "intermediate_size": 96, "image_size": 16, "patch_size": 4}
    classes: dict[str, tuple[Any, PreTrainedConfig]] = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)),
        "opt": (transformers.OPTForCausalLM, transformers.OPTConfig(**opt)),
        "vit": (transformers.ViTForImageClassification, transformers.ViTConfig(**vit, num_labels=8)),
        "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**LLAMA, num_local_experts=4)),
    }
    for seed, (name, (kind, config)) in enumerate(classes.items()):
        torch.manual_seed(seed)
        model = kind(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases of zero and norms of one would hide a mistake
                parameter.data += torch.randn_like(parameter) * 0.2
        model.save_pretrained(folder / name)

    letters = {symbol: number for number, symbol in enumerate(["<s>", "</s>", "<unk>", "\n", *sorted(set(WORDS))])}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    for name in classes.keys() - {"vit"}:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder / name)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")

    of_text = {"text": text, "samples": 24, "window": 32, "compute_dtype": "float32"}
    given = {name: {**of_text, "model": folder / name} for name in classes}
    given["vit"] = {"model": folder / "vit", "images": images, "samples": 24}
    return {"carried": {**of_text, "model": CARRIED, "samples": 16, "window": 64}, **given}


def hashes_of(folder: Path) -> dict[str, str]:
    """The hash of config.json and of each tensor of an output, with its dtype and shape."""
    hashes = {"config.json": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name).contiguous()
                digest = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                hashes[f"{file.name} {name}"] = f"{tensor.dtype} {list(tensor.shape)} {digest}"
    return hashes


def hash_output(recipe: RecipeFile, given: Mapping[str, Any], scratch: Path, **more: Any) -> dict[str, str]:
    """The hashes of one output, or the words of the refusal."""
    stated = FullRecipe.expand_names(yaml.safe_load(recipe_text(recipe)))
    ratios = [space for space in stated.get("spaces", {}).values() if "ratio" in space]
    if not ("mask" in stated or "ratio" in stated or ratios):
        more["ratio"] = RATIO
    overrides: dict[str, object] = {}
    for key in stated.keys() & SHORTER.keys():
        overrides |= SHORTER[key] if stated[key].get("method") != "scales" else {}
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        try:
            how = {"overrides": overrides, "evaluate_samples": 0, "progress": False}
            cp.prune(recipe=recipe.name, output=Path(out, "out"), **how, **given, **more)
        except cp.UserError as error:
            return {"refused": str(error).replace(str(scratch), "").replace(str(ROOT), "")}
        return hashes_of(Path(out, "out"))


def is_chosen(key: str, only: list[str]) -> bool:
    """Whether a job is asked for."""
    return not only or any(fnmatch(key.partition(" ")[0], pattern) for pattern in only)


def prune_all(only: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Prune every model by every recipe that is asked for; yielded are RECIPE/MODEL and its hashes."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        models = make_models(scratch)
        for recipe in shipped_recipes().values():
            for model, given in models.items():
                key, start = f"{recipe.name}/{model}", time.monotonic()
                if not is_chosen(key, only):
                    continue
                yield key, (hashes := hash_output(recipe, given, scratch))
                if "refused" in hashes and "container" in hashes["refused"]:
                    yield f"{key} container=any", hash_output(recipe, given, scratch, container="any")
                print(f"{key}: {hashes.get('refused', f'{len(hashes)} hashes')} ({time.monotonic() - start:.1f} s)")


def differences(before: Hashes, after: Hashes) -> Iterator[str]:
    """Every job and every hash that differs, in a line."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            yield f"{key}: {'was not there' if old is None else 'is no longer there'}"
            continue
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                yield f"{key}: {name}: {old.get(name, 'was not there')} -> {new.get(name, 'is no longer there')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file of hashes")
    parser.add_argument("--check", action="store_true", help="compare with the file in place of writing it")
    parser.add_argument("--only", action="append", default=[], metavar="RECIPE/MODEL", help="pattern of jobs")
    parser.add_argument("--force", action="store_true", help="compare though the hashes are of another machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    here = environment()
    stored: dict[str, Any] = (
        json.loads(given.file.read_text(encoding="utf-8")) if given.check else {"environment": here}
    )
    if stored["environment"] != here and not given.force:
        sys.exit(f"{given.file} is of {stored['environment']}, this is {here}: compare by force (--force)")
    hashes = dict(prune_all(given.only))
    refused = sum("refused" in entry for entry in hashes.values())
    count = sum(len(entry) for entry in hashes.values()) - refused
    print(f"{len(hashes) - refused} outputs with {count} hashes, {refused} refusals; {here}")
    if not given.check:
        given.file.write_text(json.dumps({"environment": here, "hashes": hashes}, indent=1), encoding="utf-8")
        return
    expected = {key: entry for key, entry in stored["hashes"].items() if is_chosen(key, given.only)}
    changes = list(differences(expected, hashes))
    print("\n".join(changes) or "all are the same")
    sys.exit(1 if changes else 0)


if __name__ == "__main__":
    main()
