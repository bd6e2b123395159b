import hashlib
import json
from pathlib import Path

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import processor_fingerprint, tokenizer_fingerprint
from ckpt_prune.checkpoint.files import sha256_files

from .folders import CONFIG, example_tensors, save_sharded, save_single


def fingerprint(folder: Path) -> str:
    return Checkpoint.open(folder).fingerprint


def test_storage_and_library_version_do_not_matter(tmp_path: Path) -> None:
    tensors = example_tensors()
    expected = fingerprint(save_single(tmp_path / "single", tensors))
    assert len(expected) == 64
    assert fingerprint(save_sharded(tmp_path / "two", tensors, 2)) == expected
    assert fingerprint(save_sharded(tmp_path / "three", tensors, 3)) == expected
    loading = {"transformers_version": "4", "transformers_weights": "model.safetensors"}
    assert fingerprint(save_single(tmp_path / "v4", tensors, CONFIG | loading)) == expected
    reordered = dict(reversed(CONFIG.items()))
    assert fingerprint(save_single(tmp_path / "order", tensors, reordered)) == expected


def test_any_element_of_a_small_tensor_matters(tmp_path: Path) -> None:
    tensors = example_tensors()
    seen = {fingerprint(save_single(tmp_path / "base", tensors))}
    for number in range(35):
        changed = tensors["model.embed.weight"].clone()
        changed.view(-1)[number] += 1
        seen.add(fingerprint(save_single(tmp_path / str(number), tensors | {"model.embed.weight": changed})))
    assert len(seen) == 36


def test_a_large_tensor_is_sampled_at_its_edges_and_throughout(tmp_path: Path) -> None:
    weight = torch.zeros(100_000)
    base = fingerprint(save_single(tmp_path / "base", {"w": weight}))
    for position in (0, 1023, 98_976, 99_999, 6666):
        changed = weight.clone()
        changed[position] = 1
        assert fingerprint(save_single(tmp_path / str(position), {"w": changed})) != base
    assert fingerprint(save_single(tmp_path / "all", {"w": weight + 1e-3})) != base
    # What the documentation admits: between the pieces an edit goes unseen.
    changed = weight.clone()
    changed[2000] = 1
    assert fingerprint(save_single(tmp_path / "unseen", {"w": changed})) == base


def test_config_names_dtypes_and_shapes_matter(tmp_path: Path) -> None:
    weight = torch.zeros(2, 6)
    variants = {
        "base": ({"w": weight}, CONFIG),
        "config": ({"w": weight}, CONFIG | {"hidden_size": 5}),
        "name": ({"v": weight}, CONFIG),
        "shape": ({"w": weight.reshape(3, 4)}, CONFIG),
        "dtype": ({"w": weight.to(torch.int32)}, CONFIG),
    }
    seen = {fingerprint(save_single(tmp_path / key, *variant)) for key, variant in variants.items()}
    assert len(seen) == len(variants)


def test_tokenizer_fingerprint(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) is None
    (tmp_path / "vocab.json").write_text("{}")
    slow = tokenizer_fingerprint(tmp_path)
    (tmp_path / "merges.txt").write_text("a b")
    both = tokenizer_fingerprint(tmp_path)
    (tmp_path / "merges.txt").write_text("a c")
    assert len({slow, both, tokenizer_fingerprint(tmp_path)}) == 3
    (tmp_path / "merges.txt").write_text("a b")
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    assert tokenizer_fingerprint(tmp_path) == both


def test_processor_fingerprint(tmp_path: Path) -> None:
    assert processor_fingerprint(tmp_path) is None
    image_config, of_all = tmp_path / "preprocessor_config.json", tmp_path / "processor_config.json"
    image_config.write_text("{}")
    alone = processor_fingerprint(tmp_path)
    of_all.write_text("{}")  # transformers lets its image_processor, if any, win
    both = processor_fingerprint(tmp_path)
    of_all.write_text('{"image_processor": {}}')
    won = processor_fingerprint(tmp_path)
    image_config.unlink()
    assert len({alone, both, won, processor_fingerprint(tmp_path), None}) == 5
    (tmp_path / "vocab.json").write_text("{}")
    of_all.unlink()
    image_config.write_text("{}")
    assert processor_fingerprint(tmp_path) == alone


def test_sha256_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"")
    assert sha256_files(tmp_path, ["a", "b"]) == {
        "a": hashlib.sha256(b"one").hexdigest(),
        "b": hashlib.sha256(b"").hexdigest(),
    }
