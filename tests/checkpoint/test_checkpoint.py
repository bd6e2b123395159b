"""Opening and reading whole folders, and every way in which one can be wrong."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt_prune.checkpoint import shard
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.side_files import carried_files, find_side_files
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import load_reported
from tests.refusals import refusal

from .folders import CONFIG, example_tensors, same, save_sharded, save_single, write_index

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("at", [None, 0, 20, 40, -1])
def test_tensors_are_equal_if_all_their_pieces_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Any) -> None:
    """A head that was equal to the embedding in one piece of several was taken as tied to it, and dropped."""
    monkeypatch.setattr(shard, "_CHUNK_BYTES", 64)
    one = torch.arange(48.0).reshape(6, 8)
    other = one.clone()
    if at is not None:
        other.view(-1)[at] += 1
    checkpoint = Checkpoint.open(save_single(tmp_path / "m", {"one": one, "other": other, "short": one[:5].clone()}))
    assert checkpoint.equal("one", "other") == (at is None)
    assert not checkpoint.equal("one", "short")


message_of = partial(refusal, Checkpoint.open)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return example_tensors()


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return save_single(tmp_path / "single", tensors)


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return save_sharded(tmp_path / "sharded", tensors)


class TestOpen:
    def test_single_file(self, single: Path, tensors: dict[str, Tensor]) -> None:
        checkpoint = Checkpoint.open(single)
        assert checkpoint.path == single
        assert checkpoint.config == CONFIG
        assert checkpoint.files == ("model.safetensors",)
        assert not checkpoint.sharded
        assert checkpoint.metadata == {"model.safetensors": {"format": "pt"}}
        for name, tensor in tensors.items():
            info = checkpoint.tensors[name]
            assert (info.name, info.dtype, info.shape) == (name, tensor.dtype, tuple(tensor.shape))
            assert (info.file, info.nbytes, info.numel) == ("model.safetensors", tensor.nbytes, tensor.numel())
        assert checkpoint.tensors.keys() == tensors.keys()

    def test_sharded(self, sharded: Path, tensors: dict[str, Tensor]) -> None:
        checkpoint = Checkpoint.open(str(sharded))
        assert checkpoint.files == (FIRST, SECOND)
        assert checkpoint.sharded
        assert checkpoint.metadata[SECOND] == {"format": "pt", "shard": "1"}
        assert {name: info.file for name, info in checkpoint.tensors.items()} == {
            name: (FIRST, SECOND)[number % 2] for number, name in enumerate(tensors)
        }

    def test_hub_cache_of_links_to_blobs(self, tmp_path: Path, sharded: Path, tensors: dict[str, Tensor]) -> None:
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (tmp_path / "blobs").mkdir()
        for number, file in enumerate(sorted(sharded.iterdir())):
            file.rename(tmp_path / "blobs" / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        checkpoint = Checkpoint.open(snapshot)
        assert same(checkpoint.read(["model.embed.weight"])["model.embed.weight"], tensors["model.embed.weight"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
            ("[" * 100_000, "nested too deeply"),
            ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ],
    )
    def test_bad_config(self, single: Path, text: str, reason: str) -> None:
        (single / "config.json").write_text(text)
        path = single / "config.json"
        assert message_of(single) == f"{path} is not a readable JSON object ({reason}); download or restore the file"

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
    def test_json_that_is_not_plain_utf8(self, single: Path, name: str, encoding: str) -> None:
        (single / name).write_bytes(json.dumps(CONFIG | {"name": "é"}, ensure_ascii=False).encode(encoding))
        reason = "not UTF-8 text: save it as UTF-8"
        if encoding == "utf-8-sig":
            reason = "UTF-8 with a byte order mark: save it as UTF-8 without one"
        assert message_of(single) == f"{single / name} is {reason}"

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("{", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
            ("[1]", "not a JSON object"),
            ("[" * 100_000, "not valid JSON (nested too deeply)"),
        ],
    )
    def test_side_files_that_transformers_cannot_load(self, single: Path, text: str, fault: str) -> None:
        (single / "special_tokens_map.json").write_text(text)
        message = f"{single / 'special_tokens_map.json'} is {fault}; restore the file, or remove it"
        assert message_of(single) == message_of(single) == message
        (single / "special_tokens_map.json").write_text('{"a": 1, "a": 2}')  # transformers takes the last one
        Checkpoint.open(single)

    def test_only_pickles(self, single: Path) -> None:
        (single / "model.safetensors").rename(single / "pytorch_model.bin")
        assert message_of(single) == (
            f"{single} has only pickled weights (pytorch_model.bin), which are never unpickled; "
            'convert them where they are trusted: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{single}').save_pretrained('NEW')\", "
            "or use https://huggingface.co/spaces/safetensors/convert"
        )

    def test_no_weights(self, single: Path) -> None:
        (single / "model.safetensors").unlink()
        assert message_of(single).startswith(
            f"{single} has neither model.safetensors nor model.safetensors.index.json; "
            "if it was published as .bin pickles, convert them"
        )

    def test_weights_that_transformers_reads_from_elsewhere(self, single: Path) -> None:
        config = json.loads((single / "config.json").read_text())
        for named, auto_map in (("other.safetensors", None), ("other.safetensors", {}), ("no file", None)):
            own_code = {} if auto_map is None else {"auto_map": auto_map}
            (single / "config.json").write_text(json.dumps(config | {"transformers_weights": named} | own_code))
            assert message_of(single) == (
                f"{single}/config.json: transformers reads weights from {named!r} (transformers_weights), and they "
                "are read from model.safetensors here; rename the file, or take the key out where "
                "model.safetensors is the right one"
            )
        (single / "config.json").write_text(json.dumps(config | {"transformers_weights": "model.safetensors"}))
        assert Checkpoint.open(single).files == ("model.safetensors",)

    @pytest.mark.parametrize(("change", "wrong"), [(-1, "truncated"), (1, "too long")])
    def test_shard_of_another_length(self, sharded: Path, change: int, wrong: str) -> None:
        path = sharded / FIRST
        size = path.stat().st_size
        os.truncate(path, size + change)
        assert message_of(sharded) == (
            f"{path} is {size + change} bytes long but its header says {size}: it is {wrong}; download it again"
        )

    @pytest.mark.parametrize(
        ("content", "fault"),
        [
            ({}, "has no weight_map"),
            ({"weight_map": {}}, "has an empty weight_map"),
            ({"weight_map": ["a"]}, "has a list as its weight_map, not a map from tensor names to files"),
        ],
    )
    def test_index_without_map(self, sharded: Path, content: dict[str, object], fault: str) -> None:
        index = sharded / "model.safetensors.index.json"
        index.write_text(json.dumps(content))
        assert message_of(sharded) == f"{index} {fault}; download it again"

    def test_index_listing_too_much_or_too_little(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"]
        write_index(sharded, weight_map | {"ghost": FIRST})
        assert message_of(sharded) == (
            f"{sharded / FIRST} lacks tensor 'ghost', which model.safetensors.index.json puts there; "
            "download both again"
        )
        write_index(sharded, weight_map | {"ghost": FIRST, "spook": FIRST})
        assert "lacks tensor 'ghost' and 1 more, which" in message_of(sharded)
        del weight_map["model.layers.0.up.weight"]
        write_index(sharded, weight_map)
        assert message_of(sharded) == (
            f"{sharded / SECOND} holds tensor 'model.layers.0.up.weight', "
            "which model.safetensors.index.json does not put there; download both again"
        )

    @pytest.mark.parametrize("metadata", [{}, {"metadata": []}])
    def test_index_without_metadata(self, sharded: Path, metadata: dict[str, object]) -> None:
        index = sharded / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]} | metadata))
        assert message_of(sharded) == (
            f'{index} has no "metadata", without which transformers loads no shards; download it again, or put '
            '"metadata": {} into it'
        )
        with pytest.raises(UserError, match='has no "metadata", without which transformers loads no shards'):
            load_reported(sharded)

    def test_shards_without_an_index(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        message = (
            f"{sharded} has shards ({FIRST} and 1 more) and no model.safetensors.index.json, which says what each "
            "holds; download that as well"
        )
        assert message_of(sharded) == message
        assert refusal(load_reported, sharded) == message
        (sharded / SECOND).unlink()
        assert message_of(sharded) == (
            f"{sharded} has shards ({FIRST}) and no model.safetensors.index.json, which says what each holds; "
            "download that as well; 1 of its 2 shards are missing, too"
        )

    def test_weights_of_another_name(self, single: Path) -> None:
        (single / "model.safetensors").rename(single / "model.fp16.safetensors")
        assert message_of(single) == (
            f"{single} has model.fp16.safetensors, and neither model.safetensors nor model.safetensors.index.json, "
            "which transformers looks for; rename it to model.safetensors if it holds the whole model"
        )

    def test_index_with_a_key_twice(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        index.write_text(f'{{"weight_map": {{"w": "{FIRST}", "w": "{SECOND}"}}}}')
        assert "(key 'w' is given twice)" in message_of(sharded)


class TestRead:
    def test_values_in_the_order_asked(self, sharded: Path, tensors: dict[str, Tensor]) -> None:
        order = list(reversed(tensors))
        values = Checkpoint.open(sharded).read(iter(order))
        assert list(values) == order
        assert all(same(values[name], tensor) for name, tensor in tensors.items())

    def test_tensors_own_their_memory(self, single: Path, tensors: dict[str, Tensor]) -> None:
        before = (single / "model.safetensors").read_bytes()
        values = Checkpoint.open(single).read(tensors)
        for tensor in values.values():
            tensor.fill_(3)
        assert (single / "model.safetensors").read_bytes() == before
        assert str(single) not in Path("/proc/self/maps").read_text()

    def test_unknown_name(self, single: Path) -> None:
        with pytest.raises(UserError) as error:
            Checkpoint.open(single).read(["model.embed.weight", "lm_head.weight"])
        assert str(error.value) == f"{single} has no tensor 'lm_head.weight'"

    def test_file_gone_since(self, single: Path) -> None:
        checkpoint = Checkpoint.open(single)
        (single / "model.safetensors").unlink()
        with pytest.raises(
            UserError, match=r"^cannot read .*model\.safetensors \(No such file or directory\); restore"
        ):
            checkpoint.read(["model.embed.weight"])

    def test_memory_is_that_of_the_tensor_asked_for(self, tmp_path: Path) -> None:
        """Eight tensors of 16 MiB read one after the other raise the peak by little more than one."""
        folder = save_single(tmp_path / "big", {f"w{number}": torch.ones(4, 2**20) for number in range(8)})
        code = (
            "import resource, sys\n"
            "from pathlib import Path\n"
            "from ckpt_prune.checkpoint.checkpoint import Checkpoint\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "checkpoint = Checkpoint.open(Path(sys.argv[1])); before = peak()\n"
            "for name in checkpoint.tensors: checkpoint.read([name])\n"
            "print(peak() - before)"
        )
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
        assert int(done.stdout) < 40 * 1024


def test_side_files(single: Path) -> None:
    kept = ["LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer.model"]
    left_out = "README.md ckpt_prune.json .gitattributes a.bin b.pt c.pth d.ckpt e.msgpack f.h5 g.onnx h.gguf J.BIN"
    for name in (*kept, *left_out.split(), "modeling.py", "other.safetensors", "pytorch_model.bin.index.json"):
        (single / name).write_text("x")
    (single / "folder").mkdir()
    (single / "tokenizer_config.json").symlink_to("tokenizer.json")
    assert list(find_side_files(single).files) == sorted([*kept, "tokenizer_config.json"])


def test_side_files_that_are_links_lead_into_the_folder_or_the_hubs_blobs(tmp_path: Path, single: Path) -> None:
    (tmp_path / "secret").write_text("private")
    link = single / "notes.txt"
    link.symlink_to("../secret")
    assert refusal(find_side_files, single) == (
        f"{link} is a link out of its folder, and what it leads to would be in the output; put the file itself there, "
        "or remove the link"
    )
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    (tmp_path / "models--a--b/blobs").mkdir(parents=True)
    (tmp_path / "models--a--b/blobs/123").write_text("{}")
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    assert find_side_files(snapshot).files == {"tokenizer.json": snapshot / "tokenizer.json"}
    (snapshot / "vocab.json").symlink_to("../../../secret")
    with pytest.raises(UserError, match=r"vocab\.json is a link out of its folder"):
        find_side_files(snapshot)


def test_side_files_that_change_meanwhile(single: Path) -> None:
    (single / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint.open(single)
    (single / "notes.txt").write_text("appeared")
    assert carried_files(checkpoint) == {"tokenizer.json": single / "tokenizer.json"}
    for change in ((single / "tokenizer.json").unlink, lambda: (single / "config.json").write_text("{} ")):
        checkpoint = Checkpoint.open(single)
        change()
        with pytest.raises(UserError, match=r"\.json changed since it was opened; run again"):
            carried_files(checkpoint)


class TestCheckFinite:
    def test_finite(self, sharded: Path) -> None:
        Checkpoint.open(sharded).check_finite()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
    def test_first_bad_tensor_is_named_with_its_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
    ) -> None:
        monkeypatch.setattr(shard, "_CHUNK_BYTES", 32)
        bad = torch.ones(5, 9)
        bad[0, 0], bad[4, 8], bad[2, 3] = float("nan"), float("inf"), -float("inf")
        tensors = {"a": torch.ones(2).to(dtype), "b": bad.to(dtype, copy=True), "c": bad.to(dtype, copy=True)}
        folder = save_single(tmp_path / "bad", tensors)
        assert refusal(Checkpoint.open(folder).check_finite) == (
            f"{folder / 'model.safetensors'}: tensor 'b' has 3 NaN or Inf among 45 elements; "
            "download it again or repair it"
        )


def test_a_causal_mask_that_old_transformers_saved_may_be_infinite(tmp_path):
    """-1e9, which float16 does not hold."""
    tensors = {"h.0.attn.masked_bias": torch.tensor(-1e9).half(), "h.0.attn.weight": torch.ones(2, 2)}
    Checkpoint.open(save_single(tmp_path / "model", tensors)).check_finite()
    tensors["h.0.attn.weight"][0, 0] = float("inf")
    with pytest.raises(UserError, match=r"h\.0\.attn\.weight"):
        Checkpoint.open(save_single(tmp_path / "other", tensors)).check_finite()
