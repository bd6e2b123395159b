"""What a reference computed is used again, and only for the same model on the same windows."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.evaluation import kept_states
from ckpt_prune.evaluation.perplexity import compare, self_noise
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from tests.evaluation.test_streamed import ROUNDING
from tests.evaluation.tiny import random_windows
from tests.families import BLOCKS, make

WINDOWS = random_windows(3, 12, seed=5)
CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ckpt-prune" / "references"


@pytest.fixture
def blocks_run(monkeypatch):
    """The blocks that were run, by their numbers."""
    run, numbers = HiddenStream.pass_through, []

    def count(stream, block, index, *states):
        numbers.append(index)
        return run(stream, block, index, *states)

    monkeypatch.setattr(HiddenStream, "pass_through", count)
    return numbers


@pytest.fixture
def pair(tmp_path):
    return make(tmp_path / "reference"), make(tmp_path / "model", dtype=torch.bfloat16)


def read(pair, windows=WINDOWS, dtype=torch.float32):
    models = [StreamedModel.open(folder, CPU, dtype) for folder in reversed(pair)]
    assert None not in models
    return compare(*models, windows)


def test_a_reference_is_run_once(pair, cache, blocks_run):
    first = read(pair)
    assert len(blocks_run) == 2 * BLOCKS
    (file,) = cache.iterdir()
    blocks_run.clear()
    second = read(pair)
    assert len(blocks_run) == BLOCKS
    assert second.kl == first.kl > 0
    assert second.reference_score == first.reference_score
    assert torch.equal(second.spread.divergences, first.spread.divergences)
    file.write_bytes(b"damaged")
    assert read(pair).kl == first.kl
    assert len(blocks_run) == 3 * BLOCKS


@pytest.mark.parametrize("change", ["windows", "dtype", "weights"])
def test_another_question_is_answered_anew(pair, cache, blocks_run, change):
    read(pair)
    blocks_run.clear()
    if change == "weights":
        file = pair[0] / "model.safetensors"
        tensors, times = load_file(file), file.stat()
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name][0, 0] += 1
        save_file(tensors, file, {"format": "pt"})
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps times does
    windows, dtype = WINDOWS[:2] if change == "windows" else WINDOWS, torch.float32
    read(pair, windows, torch.bfloat16 if change == "dtype" else dtype)
    assert len(blocks_run) == 2 * BLOCKS
    assert len(list(cache.iterdir())) == 2


def test_what_was_used_longest_ago_goes_first(pair, cache, monkeypatch):
    read(pair, WINDOWS[:1])
    read(pair, WINDOWS[:2])
    size = max(file.stat().st_size for file in cache.iterdir())
    older, newer = sorted(cache.iterdir(), key=lambda file: file.stat().st_size)
    os.utime(older, ns=(10, 10))
    os.utime(newer, ns=(20, 20))
    monkeypatch.setattr(kept_states, "MOST_BYTES", 2 * size)
    read(pair, WINDOWS[:1])  # used, and so the newest
    read(pair, WINDOWS[1:])
    assert older.exists()
    assert not newer.exists()
    monkeypatch.setattr(kept_states, "MOST_BYTES", size)
    kept = set(cache.iterdir())
    read(pair, WINDOWS)  # takes more than half
    assert set(cache.iterdir()) == kept


def test_a_cache_that_cannot_be_written_is_done_without(pair, cache):
    cache.parent.parent.write_text("no folder")
    assert read(pair).kl > 0


def test_the_noise_is_that_of_the_model_in_another_dtype(pair, cache):
    folder, _ = pair
    whole = compare(load_model(folder, device="cpu", dtype=torch.bfloat16), load_model(folder, device="cpu"), WINDOWS)
    opened = StreamedModel.open(folder, CPU, torch.float32)
    assert whole.kl > 0
    assert self_noise(opened, WINDOWS) == pytest.approx(whole.kl, abs=ROUNDING)
