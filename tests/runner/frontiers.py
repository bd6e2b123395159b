"""What tests of `frontier` share: a tiny model with two texts, its command line, and what it writes."""

import json
import math
import os
import shlex

import pytest
import torch
from click.testing import CliRunner

from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from tests.gguf_files.tiny import TEXT, save


def run(*arguments):
    """Run a command; return its exit code and its output."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def make_place(place, kind="llama", **changes):
    """Write a model of two blocks into a folder, a text to measure it on, and another that is held out."""
    save(place / "model", kind, **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **changes})
    (place / "text.txt").write_text(TEXT)
    (place / "held_out.txt").write_text(TEXT[::-1])
    return place


def make_command(place, out, *more, samples, window):
    data = ["--text", place / "text.txt", "--held-out", place / "held_out.txt"]
    few = ["--samples", samples, "--window", window, "--held-out-samples", 2]
    return ["frontier", place / "model", *data, *few, "-o", place / out, *more]


@pytest.fixture
def all_tokens(monkeypatch):
    """No smaller vocabulary is in question."""
    keep_all_tokens(monkeypatch)


def keep_all_tokens(monkeypatch):
    """Let no vocabulary be made smaller: the texts of these tests do without most tokens."""

    def refuse(*_):
        raise UserError("its tokenizer is of a kind of its own")

    monkeypatch.setattr("ckpt_prune.runner.vocabularies.VocabularyChoice", refuse)


def cost_more(dense, fewer, tokenizers, windows):
    """Return what windows of one model's tokens cost more as another writes them, nats a token of the first."""
    lost = 0.0
    for window in windows:
        before, after = tokenizers
        parts = [after.convert_tokens_to_ids(after.tokenize(before.decode([token]))) for token in window]
        written, first = [part for own in parts for part in own], len(parts[0])
        for sign, model, ids, start in ((1, dense, window, 1), (-1, fewer, written, first)):
            predicted = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
            lost += sign * float(predicted[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum())
    return lost / sum(len(window) - 1 for window in windows)


def stop(*_, **__):
    """Stand for what is interrupted."""
    raise KeyboardInterrupt


def fail(*_, **__):
    """Stand for what is already measured."""
    raise AssertionError("measured again")


def paste(output, monkeypatch):
    """Run the lines that a search has printed behind what it found, as a shell would."""
    lines = output.splitlines()
    own = lines[next(place for place, line in enumerate(lines) if line.startswith("cd ")) :]
    assert own.pop().startswith("written to ")
    for name, *words in map(shlex.split, own):
        if name == "ckpt-prune":
            code, output = run(*words)
            assert code == 0, output
            assert "fewer bits lose less" not in output  # a search has chosen between both
        else:
            {"cd": monkeypatch.chdir, "mv": os.rename}[name](*words)


def best_of(found):
    """Return the candidate that is recommended."""
    return next(each for each in found["candidates"] if each["name"] == found["recommended"])


def find_smallest(place, words):
    """Run a command that asks for a loss of 10 % in the folder `loss`; the best is the smallest within. Return all."""
    code, output = run(*words)
    assert code == 0, output
    found = read(place, "loss")
    within = [each for each in found["candidates"] if each["kl"] <= math.log1p(0.1)]
    assert best_of(found)["bytes"] == min(each["bytes"] for each in within)
    return found


def read(place, out):
    return json.loads((place / out / "frontier.json").read_text())
