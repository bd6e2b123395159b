"""`--format compressed` is refused, and what the refusal says of compressed-tensors and transformers is true."""

import json
import sys
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import is_compressed_tensors_available

from ckpt_prune.checkpoint.compressed import refuse_compressed
from ckpt_prune.errors import UserError
from tests.evaluation.tiny import tiny_llama

INSTEAD = (
    "; leave --format out: the plain output loads where the dense model does, and "
    "torch.sparse.to_sparse_semi_structured packs its 2:4 weights on NVIDIA GPUs of compute capability 8.0 or later"
)
needs_the_library = pytest.mark.skipif(
    not is_compressed_tensors_available(), reason="no compressed-tensors is installed that transformers takes"
)


@pytest.fixture
def library(monkeypatch):
    """A function that puts a compressed_tensors with these names in its module of compressors into sys.modules."""

    def install(version: str | None, *names: str) -> None:
        package, compressors = ModuleType("compressed_tensors"), ModuleType("compressed_tensors.compressors")
        package.__path__ = []
        if version:
            package.__version__ = version
        for name in names:
            setattr(compressors, name, object)
        monkeypatch.setitem(sys.modules, "compressed_tensors", package)
        monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", compressors)

    return install


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        refuse_compressed()
    message = str(caught.value)
    assert message.startswith("--format compressed cannot be written: ")
    assert message.endswith(INSTEAD)
    assert "\n" not in message
    return message.removeprefix("--format compressed cannot be written: ").removesuffix(INSTEAD)


def test_without_the_library(monkeypatch):
    """Installing it is not advised: no version would do."""
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    monkeypatch.delitem(sys.modules, "compressed_tensors.compressors", raising=False)
    assert refusal() == (
        "compressed-tensors is not installed, and installing it would not help: it has no 2:4 compressor since 0.15.0 "
        "(compressed-tensors#610), and transformers takes no older one"
    )


def test_with_a_version_that_dropped_the_compressor(library):
    library("0.20.0", "BaseCompressor", "ModelCompressor")
    assert refusal() == (
        "compressed-tensors 0.20.0 has no 2:4 compressor: it was dropped in 0.15.0 (compressed-tensors#610), and vLLM "
        "and transformers no longer read what it wrote"
    )


def test_with_a_version_that_has_the_compressor(library):
    library("0.14.0.1", "BaseCompressor", "Sparse24BitMaskCompressor")
    assert refusal() == (
        "compressed-tensors 0.14.0.1 has a 2:4 compressor, but the transformers that this tool needs (5.23 or later) "
        "loads with compressed-tensors 0.15.0 or later only, which had none when this was written"
    )


def test_a_version_that_does_not_say_which(library):
    library(None)
    assert refusal().startswith("compressed-tensors (of unknown version) has no 2:4 compressor")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'"),
        ("raise RuntimeError('made for\\nanother time')", "made for another time"),
        ("raise ValueError", "ValueError"),
    ],
)
def test_with_a_library_that_does_not_import(tmp_path, monkeypatch, source, said):
    """As 0.14.0.1 without psutil."""
    (tmp_path / "compressed_tensors").mkdir()
    (tmp_path / "compressed_tensors" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "compressed_tensors"]:
        monkeypatch.delitem(sys.modules, name)
    assert refusal() == f"compressed-tensors does not import ({said})"


def test_the_oldest_version_that_transformers_takes_is_the_one_named():
    """Where this fails, transformers takes other versions and the module's words are to be checked again."""
    assert transformers.utils.import_utils.COMPRESSED_TENSORS_MIN_VERSION == "0.15.0"


@needs_the_library
def test_the_installed_library_is_refused():
    import compressed_tensors

    said = refusal()
    assert said.startswith(f"compressed-tensors {compressed_tensors.__version__} has ")


@needs_the_library
@pytest.mark.filterwarnings("ignore")
def test_transformers_fills_a_compressed_folder_with_random_weights(tmp_path):
    """Why nothing is written that nobody reads: the load only warns."""
    tiny_llama(hidden_size=32, intermediate_size=32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".layers." in name and tensors[name].ndim == 2]:
        weight = tensors.pop(name)
        path = name.removesuffix(".weight")
        tensors[f"{path}.shape"] = torch.tensor([list(weight.shape)]).T.contiguous()
        tensors[f"{path}.compressed"] = weight[:, ::2].contiguous()
        tensors[f"{path}.bitmask"] = torch.full((weight.shape[0], weight.shape[1] // 8), 0b01010101, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    sparsity = {
        "format": "sparse-24-bitmask",
        "sparsity_structure": "2:4",
        "targets": ["Linear"],
        "ignore": ["lm_head"],
    }
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparsity}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 14
    assert len(info["unexpected_keys"]) == 42
