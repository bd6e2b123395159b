"""Variants of every stage, and a run of two of them in one recipe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.stages import STAGES
from tests.cli.running import listing, ok, run

Keys = dict[str, Any]


def _spaces(method: str, score: str = "rcpu", **own: Any) -> Keys:
    space = {"score": score, "compensation": {"method": method} | own}
    return {"spaces": {"heads": space, "mlp": space}}


def _mask(method: str, **own: Any) -> Keys:
    return {"mask": {"method": method} | own}


VARIANTS: dict[str, dict[str, Keys]] = {
    "depth": {
        "blocks": {"depth": {"blocks": [1]}},
        "influence": {"depth": {"drop": 1, "choose": "influence"}},
        "loss": {"depth": {"drop": 1, "choose": "loss"}},
        "map": {"depth": {"drop": 1, "compensation": {"method": "linear"}}},
        "folds": {"depth": {"drop": 1, "compensation": {"method": "linear", "lambda_by": "folds"}}},
        "part": {"depth": {"drop": 1, "part": "attention"}},
        "auto": {"depth": {"drop": "auto"}},
    },
    "bare": {
        "given": {"bare": {"blocks": [1], "epochs": 1}},
        "tried": {"bare": {"epochs": 1}},
    },
    "hidden": {
        "per-block": {"hidden": {"kind": "per-block", "drop": 8}},
        "shared": {"hidden": {"kind": "shared", "drop": 8}},
        "auto": {"hidden": {"kind": "shared", "drop": "auto"}},
    },
    "rotation": {
        "per-layer": {"rotation": {"kind": "per-layer", "steps": 2}},
        "shared": {"rotation": {"kind": "shared", "steps": 2}},
        "values": {"rotation": {"kind": "values", "steps": 2}},
        "in turn": {"rotation": {"kind": "values", "steps": 2, "measured": "pruned"}, "target": "sequential"},
    },
    "spaces": {
        "none": _spaces("none", "magnitude"),
        "bias": _spaces("bias"),
        "ridge": _spaces("ridge"),
        "affine": _spaces("affine") | {"container": "any"},
        "rotation": _spaces("rotation"),
        "grail": _spaces("grail"),
        "auto": _spaces("auto"),
        "sequential": _spaces("ridge") | {"target": "sequential"},
        "drift": _spaces("ridge") | {"target": "drift"},
        "perplexity": _spaces("ridge", lambda_by="perplexity", lambda_grid=[0.1, 1.0]),
        "least error": _spaces("ridge") | {"allocation": "least-error"},
        "own widths": _spaces("ridge") | {"allocation": "least-error", "widths": "per_layer"},
        "energy": _spaces("ridge") | {"allocation": "least-error", "weigh_by": "energy"},
        "flap": _spaces("bias", "flap") | {"allocation": "across-layers-and-spaces", "widths": "per_layer"},
        "rotary": {"spaces": {"rotary": {"score": "obs", "compensation": {"method": "factors"}}}, "container": "any"},
        "values": {
            "spaces": {"values": {"score": "principal", "compensation": {"method": "ridge"}}},
            "container": "any",
        },
    },
    "mask": {
        "magnitude": _mask("magnitude"),
        "wanda": _mask("wanda"),
        "sparsegpt": _mask("sparsegpt"),
        "pattern": _mask("sparsegpt", pattern="2:4"),
        "sequential": _mask("wanda") | {"target": "sequential"},
        "owl": _mask("wanda", allocation="owl"),
    },
    "low_rank": {
        "plain": {"low_rank": {"method": "plain"}},
        "whitened": {"low_rank": {"method": "whitened"}},
        "update": {"low_rank": {"update": True}, "target": "sequential"},
        "energy": {"low_rank": {"allocation": "energy"}},
    },
    "recovery": {
        "laco": {"recovery": {"epochs": 1}},
        "scales": {"recovery": {"method": "scales", "epochs": 1}},
    },
    "quantize": {
        "nearest": {"quantize": {"format": "int8", "rounding": "nearest"}},
        "gptq": {"quantize": {"format": "int8", "rounding": "gptq"}},
        "gptq int4": {"quantize": {"format": "int4", "rounding": "gptq", "group_size": "32"}},
    },
    "export": {
        "onnx": {"export": {"format": "onnx", "validate": False}},
        "gguf": {"export": {"format": "gguf", "validate": False}},
    },
}
"""Stage → name of a variant → the recipe's keys that it needs."""
# The vocabulary goes before any block is read, from tokenizers that these models have not: tests/stages/vocabulary.
assert ["vocabulary", *VARIANTS] == [stage.key for stage in STAGES]

Variant = tuple[str, str]


def deal_pairs(first: str, second: str, turn: int) -> Iterator[tuple[Variant, Variant]]:
    """Yield variants of both stages with one of the other's, every third of many; another turn yields other pairs."""
    ours, theirs = list(VARIANTS[first]), list(VARIANTS[second])
    many = max(len(ours), len(theirs))
    for place in range(turn % 3, many, 3) if many > 6 else range(many):
        yield (first, ours[place % len(ours)]), (second, theirs[(place + turn) % len(theirs)])


def recipe_of(*variants: Variant) -> Keys:
    """Return the recipe of some variants; with a mask or spaces besides, where they need one and have none."""
    stages = {stage for stage, _ in variants}
    keys: Keys = {"version": 1, "name": "pair", "ratio": 0.5}
    if "rotation" in stages - {"mask"}:
        keys |= _mask("wanda")
    elif not stages & {"depth", "bare", "hidden", "spaces", "mask", "low_rank"}:
        keys |= VARIANTS["spaces"]["none"]
    for stage, name in variants:
        keys |= VARIANTS[stage][name]
    if "mask" in keys and "pattern" in keys["mask"]:
        del keys["ratio"]
    return keys


def try_recipe(keys: Keys, model: str, data: tuple[str, ...]) -> str:
    """Run a recipe. Return "works" if its output verifies, "refused" and the message if it is before any block runs.

    Whatever else happens fails.
    """
    Path("pair.yaml").write_text(yaml.safe_dump(keys))
    before, opened = listing(), []
    original = HiddenStream.__init__

    def count(self: HiddenStream, *args: Any, **named: Any) -> None:
        opened.append(self)
        original(self, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HiddenStream, "__init__", count)
        result = run("prune", model, "--recipe", "pair.yaml", *data, "-o", "out")
    if result.exit_code == 0:
        assert "FAILED" not in ok("verify", "out", "--against", model)
        return "works"
    *_, line = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, line.partition(" ")[0]) == (2, "", "Error:"), result.output
    assert not opened, f"measured before it says {line}"
    assert listing() == before
    return f"refused: {line.removeprefix('Error: ')}"
