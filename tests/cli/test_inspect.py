"""`inspect`: headers and configs only."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.cli.running import edit_weights, ok, read_refusal
from tests.evaluation.tiny import tiny_llama

LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}

DENSE = """\
model       dense
family      llama (LlamaForCausalLM)
for         text-generation
weights     float32, 20.8 KB in 1 file(s)
parameters  5.20K
of these    mlp 2.30K (44%), attention 1.54K (30%), embedding 640 (12%), head 640 (12%), rest 80 (2%)
blocks      2, 1.95K parameters each; whole ones can go (--recipe depth)
FLOPs       418K for one sample of 32 tokens
KV cache    128 B a token

space           units per block  parameters    container  with a bias
rotary          2 x rotary pair         768  remote code  remote code
queries  2 x grouped query head       1.02K        llama        llama
heads              2 x KV group       1.54K        llama        llama
values      4 x value direction         768  remote code  remote code
mlp                 24 x column       2.30K        llama        llama
"""

DENSE_PRUNED = """
by recipe rcpu:
ratio  heads  mlp  parameters    bytes  FLOPs  KV cache / token  container
0.5        1   12       3,280  13.1 KB   229K              64 B      llama
0          2   24       5,200  20.8 KB   418K             128 B      llama
"""


def test_text_with_ratios(place):
    assert ok("inspect", "dense", "--ratio", "0.5,0") == DENSE + DENSE_PRUNED
    assert ok("inspect", "dense", "--ratio", "50%,0%") == DENSE + DENSE_PRUNED


def test_a_recipe_that_is_named_has_a_row_by_its_own_ratios(place):
    output = ok("inspect", "dense", "--recipe", "rcpu", "--ratio", "0.2")
    assert output.startswith(DENSE + "\nby recipe rcpu:\nratio  ")
    by_own_ratios = ok("inspect", "dense", "--recipe", "rcpu")
    assert " ".join(by_own_ratios.split()) == " ".join(output.replace("\n0.2 ", "\nown ").split())
    Path("r.yaml").write_text(
        "version: 1\nname: r\nspaces: {heads: {score: magnitude, ratio: 0.5}, mlp: {score: magnitude, ratio: 0.25}}\n"
    )
    (size,) = json.loads(ok("inspect", "dense", "--recipe", "r.yaml", "--json"))["pruned"]
    assert (size["ratio"], size["units"]) == (None, {"heads": 1, "mlp": 18})
    Path("r.yaml").write_text("version: 1\nname: r\nspaces: {mlp: {score: magnitude}}\nsize: {params: 70%}\n")
    assert read_refusal("inspect", "dense", "--recipe", "r.yaml") == (
        "recipe r.yaml has a size, and `plan` finds its widths: say --ratio"
    )


def test_llama_7b_from_its_config_alone(tmp_path):
    """RCPU's table: heads rounded down, columns up."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    report = json.loads(ok("inspect", str(tmp_path), "--ratio", "0,0.1,0.2,0.3", "--json"))
    assert report["weights"] is False
    sizes = {p["ratio"]: p["parameters"] for p in report["pruned"]}
    assert sizes == {0: 6_738_415_616, 0.1: 6_104_158_208, 0.2: 5_469_900_800, 0.3: 4_835_643_392}
    assert report["bytes"] == 2 * 6_738_415_616
    assert ok("inspect", str(tmp_path)).splitlines()[0].endswith("(config only)")
    other = LLAMA_7B | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert ok("inspect", str(tmp_path)).splitlines()[-1].startswith("heads: whole, queries and keys are normalised ")


# ---- zeros -------------------------------------------------------------------------------------------------------


def zero(folder: str, weight: str, groups: str) -> None:
    """Zero a weight in groups of columns: "0110" keeps the two in the middle of every four."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[weight].view(-1, len(groups)).mul_(torch.tensor([float(kept) for kept in groups]))

    edit_weights(folder, change)


def test_zeros_of_an_output_with_remote_code(place):
    """Blocks of different widths."""
    args = ["--recipe", "flap-global", "--statistics", "stats", "--set", "spaces.heads.ratio=0.5"]
    ok("prune", "dense", *args, "-o", "out")
    name = "model.layers.1.mlp.up_proj.weight"
    zero("out", name, "0101")
    plain = ok("inspect", "out")
    text = ok("inspect", "out", "--sparsity")
    assert text.startswith(plain + "\nzeros in the linear weights of the blocks; pattern")
    assert text.splitlines()[-1].startswith("all ")
    sparsity = json.loads(ok("inspect", "out", "--sparsity", "--json"))["sparsity"]
    rows, columns = next(tensor["shape"] for tensor in sparsity["tensors"] if tensor["name"] == name)
    assert sparsity["modules"]["mlp.up_proj"]["zeros"] == sparsity["blocks"]["zeros"] == rows * columns // 2
    assert sparsity["blocks"]["tensors"] == 14


IMPORTED = """
import json, sys
import torch
before = set(sys.modules)
from ckpt_prune.cli.main import main
for words in ("inspect dense", "prune dense --recipe magnitude --dry-run"):
    try:
        main(words.split())
    except SystemExit as end:
        assert not end.code
heavy = {"sympy", "torch._dynamo", "transformers.modeling_utils", "ckpt_prune.modeling_pruned"}
print(json.dumps(sorted(heavy & (sys.modules.keys() - before))), file=sys.stderr)
"""


def test_what_headers_tell_imports_nothing_that_loads_models(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "dense")
    done = subprocess.run([sys.executable, "-c", IMPORTED], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr
