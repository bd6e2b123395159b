"""Tiny random checkpoints of every family, and jobs on them."""

import copy
import json
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.config_only import checkpoint_of_config
from ckpt_prune.model.descriptions import OUTSIDE_KEY, has_description, load_family
from ckpt_prune.model.discovery.discover import discover
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from tests.evaluation.tiny import BOS, EOS, VOCAB, random_windows, tiny_tokenizer
from tests.reports import comparable

CONTEXT = 32
BLOCKS = 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Variant:
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return load_family(self.model_type)

    @property
    def kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads", SIZES["num_key_value_heads"]))


MHA = {"num_key_value_heads": 4}
VARIANTS = {
    "llama": Variant("llama", MHA),  # 3 of 4 heads do not divide 16: stored as mistral
    "llama-gqa-tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama-biases": Variant("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "mistral": Variant("mistral", {"sliding_window": None, "head_dim": 6}),
    "mistral-mha": Variant("mistral", {"sliding_window": None, **MHA}),
    "qwen2": Variant("qwen2", {"tie_word_embeddings": True}),
    "qwen2-mha": Variant("qwen2", MHA),
    "qwen3": Variant("qwen3", {"head_dim": 6}),
    "qwen3-biases-mha": Variant("qwen3", {"head_dim": 4, "attention_bias": True, **MHA}),
    "seed_oss": Variant("seed_oss", {"head_dim": 6}),
    "seed_oss-biases-mha": Variant(
        "seed_oss", {"head_dim": 4, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True, **MHA}
    ),
}
"""Each family with and without groups, biases, a decoupled head_dim, a tied head."""


@cache
def _model(variant: str) -> PreTrainedModel:
    chosen = VARIANTS[variant]
    config = AutoConfig.for_model(chosen.model_type, **{**SIZES, **chosen.config})
    torch.manual_seed(sorted(VARIANTS).index(variant))
    model = getattr(transformers, chosen.family.architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.ndim == 1:
                parameter.normal_(mean=1, std=0.3)
    return model


def make(folder: Path, variant: str = "llama", *, dtype: torch.dtype = torch.float32, shard: str | None = None) -> Path:
    """Save a variant; `shard` is the largest shard's size, for instance "10KB"."""
    model = copy.deepcopy(_model(variant)).to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def model_of(raw: dict[str, Any]) -> Model:
    """A model that is only a config, with the description that is found for it if there is none."""
    if not has_description(raw):
        raw = raw | {OUTSIDE_KEY: discover(raw).description}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return Model.of(checkpoint_of_config(Path(folder)))


def windows(count: int = 8, length: int = 24, seed: int = 5) -> Tensor:
    return random_windows(count, length, seed=seed)


def calibrate(
    folder: Path,
    out: Path,
    ids: Tensor | None = None,
    *,
    folds: int = 1,
    collect: tuple[Collect, ...] = ("moments", "gram"),
) -> Statistics:
    return measure_statistics(
        Model.open(folder),
        TokenWindows(windows() if ids is None else ids),
        out,
        seed=0,
        folds=folds,
        collect=collect,
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
    )


def recipe(
    method: str = "none", score: str = "rcpu", *, heads: float = 0.25, mlp: float = 0.25, **top: Any
) -> FullRecipe:
    """One method and score in both spaces; a ratio of None leaves a space out."""
    compensation = {"method": method, "lambda": top.pop("lam", None)} | top.pop("search", {})
    spaces = {
        space: {"score": score, "ratio": ratio, "compensation": compensation}
        for space, ratio in (("heads", heads), ("mlp", mlp))
        if ratio is not None
    }
    return FullRecipe.model_validate({"version": 1, "name": "test", "spaces": spaces, **top})


def one_group(variant: str) -> float:
    """The ratio that drops one KV group."""
    return 1 / VARIANTS[variant].kv_heads


def request_on(
    folder: Path,
    full_recipe: FullRecipe,
    statistics: Statistics | None = None,
    live: Tensor | None = None,
    *,
    folds: int = 1,
    **more: Any,
) -> Job:
    """Return the job; `live` are windows to measure on."""
    samples = None if live is None else LiveSamples(TokenWindows(live), folds, torch.float32)
    return Job(Model.open(folder), full_recipe, statistics, samples, **more)


def job_on(folder: Path, full_recipe: FullRecipe, *given: Any, **more: Any) -> Prepared:
    """The same, settled."""
    return prepare_plan(request_on(folder, full_recipe, *given, **more))


def prune(prepared: Prepared, out: Path, **options: Any) -> dict[str, Any]:
    """Run a job; return its report."""
    return run_job(prepared.job, out, **options).report.data()


def stock(folder: Path, **options: Any) -> PreTrainedModel:
    """Load with stock transformers alone, and refuse a load that left anything out."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, **options
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.inference_mode()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; a report's but for its stages."""
    return {str(path.relative_to(folder)): comparable(path) for path in sorted(folder.rglob("*")) if path.is_file()}
