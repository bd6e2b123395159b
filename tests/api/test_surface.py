"""Every command's function: the same names, the same defaults, no torch before it is called, and the same refusals."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import ckpt_prune
from ckpt_prune import UserError
from ckpt_prune.cli.command import Command
from ckpt_prune.common.errors import to_user_error
from tests.cli.running import read_refusal
from tests.refusals import refusal

VERBS = [
    "benchmark",
    "calibrate",
    "compare",
    "convert",
    "evaluate",
    "export",
    "frontier",
    "inspect",
    "plan",
    "prune",
    "push",
    "quantize",
    "recover",
    "validate",
    "verify",
]


def function(verb: str) -> Callable[..., Any]:
    public_function: Callable[..., Any] = getattr(ckpt_prune, verb)
    return public_function


@pytest.mark.parametrize("verb", VERBS)
def test_a_function_takes_what_its_command_takes(verb):
    command = importlib.import_module(f"ckpt_prune.cli.{verb}_command").command
    if verb == "plan":  # its command also compares plans and sweeps
        assert {"sweep", "recipes"} < {option.name for option in command.params}
        command = Command(ckpt_prune.plan, examples=[])
    parameters = inspect.signature(function(verb)).parameters
    assert parameters.keys() - {"progress"} == {option.name for option in command.params} - {"as_json"}
    assert parameters["progress"].default is True
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    assert required == {option.name for option in command.params if option.required}


@pytest.mark.parametrize("verb", [*VERBS, "sweep"])
def test_help_explains_every_option(verb):
    page = " ".join(function(verb).__doc__.split())
    for name, field in function(verb).options.model_fields.items():
        assert f"{name}: {' '.join(field.description.split())}" in page


def test_an_option_that_is_none_is_refused_as_python_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'ratoi'"):
        ckpt_prune.prune("dense", output="out", ratoi=0.2)
    with pytest.raises(TypeError, match="missing a required"):
        ckpt_prune.recover("pruned")
    with pytest.raises(UserError, match="give -o OUT, the folder to write"):
        ckpt_prune.prune("dense")


def test_nothing_else_is_on_the_surface():
    assert set(ckpt_prune.__all__) == {*VERBS, "UserError", "__version__", "load", "sweep"}
    assert set(ckpt_prune.__all__) <= set(dir(ckpt_prune))
    with pytest.raises(AttributeError, match="has no attribute 'shrink'"):
        ckpt_prune.shrink  # noqa: B018


def test_functions_are_there_without_torch():
    names = [name for name in ckpt_prune.__all__ if name != "load"]
    code = f"import sys, ckpt_prune; [getattr(ckpt_prune, n) for n in {names}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("verb", "given", "words"),
    [
        ("prune", {"model": "dense", "output": "out", "recipe": "rpcu"}, ("dense", "-o", "out", "--recipe", "rpcu")),
        ("prune", {"model": "nowhere", "output": "out"}, ("nowhere", "-o", "out")),
        (
            "prune",
            {"model": "dense", "output": "out", "ratio": 20},
            ("dense", "-o", "out", "--ratio", "20"),
        ),
        (
            "prune",
            {"model": "dense", "output": "out", "overrides": {"spaces.mpl.ratio": 0.2}, "statistics": "stats"},
            ("dense", "-o", "out", "--set", "spaces.mpl.ratio=0.2", "--statistics", "stats"),
        ),
        ("calibrate", {"model": "dense", "output": "s"}, ("dense", "-o", "s")),
        (
            "plan",
            {"model": "dense", "statistics": "stats", "target_params": "lots"},
            ("dense", "--statistics", "stats", "--target-params", "lots"),
        ),
        (
            "recover",
            {"pruned": "pruned", "dense": "dense", "output": "out", "text": "calib.txt", "layers": "4"},
            ("pruned", "--dense", "dense", "-o", "out", "--text", "calib.txt", "--layers", "4"),
        ),
        ("evaluate", {"model": "dense", "text": "calib.txt"}, ("dense", "--text", "calib.txt")),
        ("inspect", {"model": "dense", "ratios": [0.2, 20]}, ("dense", "--ratio", "0.2,20")),
        ("benchmark", {"a": "dense", "b": "pruned", "batches": [0]}, ("dense", "pruned", "--batch", "0")),
        ("verify", {"folder": "nowhere"}, ("nowhere",)),
        ("export", {"model": "nowhere", "output": "out"}, ("nowhere", "-o", "out")),
        ("validate", {"folder": "pruned", "against": "dense"}, ("pruned", "--against", "dense")),
    ],
)
def test_what_a_command_refuses_its_function_refuses_in_the_same_words(place, verb, given, words):
    assert refusal(function(verb), **given) == read_refusal(verb, *words)


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "dense", "-o", "s"),
        ("prune", "dense", "-o", "out"),
        ("recover", "pruned", "--dense", "dense", "-o", "out"),
        ("evaluate", "dense", "--window", "16"),
    ],
)
def test_a_text_that_is_not_there_is_told_before_anything_is_loaded(place, monkeypatch, words):
    monkeypatch.setattr("ckpt_prune.model.containers.opening.open_model", lambda *_a, **_k: pytest.fail("loaded"))
    monkeypatch.setattr("ckpt_prune.checkpoint.model_folder.resolve_model", lambda *_a, **_k: pytest.fail("loaded"))
    assert (
        read_refusal(*words, "--text", "calib.txt", "--text", "clib.txt")
        == "clib.txt: no such text file: did you mean calib.txt?"
    )


def test_what_the_system_says_is_a_user_error():
    """A file name that is too long and a library's error without a file name both become a `UserError`."""
    with pytest.raises(UserError) as caught:
        ckpt_prune.plan("model", recipe="magnitude", output="x" * 300)
    assert str(caught.value) == f"{'x' * 300}: File name too long; give another path or mend this one"
    assert ckpt_prune.plan is ckpt_prune.plan
    assert ckpt_prune.plan.__name__ == "plan"
    assert str(to_user_error(OSError("cannot\nread"))) == "cannot read; look at the disk and the files that were named"
