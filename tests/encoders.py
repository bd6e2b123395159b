"""Tiny random checkpoints of vit, deit, dinov2, opt and bert, what they read, and pruning done on a whole one."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import list_collected_by_default, measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.space_kinds import FITS_LOGITS
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from tests.evaluation.tiny import BOS, EOS, VOCAB, random_windows, tiny_tokenizer
from tests.images import write_processor
from tests.oracles import closed_forms, logits

Array = NDArray[np.float64]

BLOCKS, HIDDEN, HEADS, HEAD_DIM, MLP, CONTEXT, WINDOW = 3, 16, 4, 4, 22, 32, 12
IMAGE, PATCH = 12, 4
STD = 0.3
"""Of every weight and bias, so that one left out shows."""
_SHARED = {"hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
_IMAGE = _SHARED | {"image_size": IMAGE, "patch_size": PATCH}
_LABELS = {"num_labels": 7}
_TEXT = _SHARED | {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
_OPT = {
    "ffn_dim": MLP,
    "word_embed_proj_dim": HIDDEN,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
SIZES: dict[str, dict[str, Any]] = {
    "vit": _IMAGE | _LABELS | {"intermediate_size": MLP},
    "deit": _IMAGE | _LABELS | {"intermediate_size": MLP},
    "dinov2": _IMAGE | _LABELS | {"mlp_ratio": 4},
    "opt": _TEXT | _OPT,
    "bert": _TEXT | _LABELS | {"intermediate_size": MLP},
}

Edit = Callable[[dict[str, Tensor], dict[str, Any]], dict[str, Tensor]]
"""(tensors, config) as save_pretrained wrote them → the tensors to store; the config is edited in place."""


def _declare_masked(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """bert-base-uncased names a class with fewer heads than it has tensors for."""
    config["architectures"] = ["BertForMaskedLM"]
    return tensors


def _old_bert(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """TensorFlow's names of layer norms, and position indices, as the first conversions have them."""
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        end = next((end for end in ends if name.endswith(end)), "")
        renamed[name.removesuffix(end) + ends.get(end, "")] = tensor
    return renamed | {"bert.embeddings.position_ids": torch.arange(CONTEXT)[None]}


def no_pooler(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Drop the pooler: a class built with `add_pooling_layer=False` saves none (gte-small, most embedding models)."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}


def _without(prefix: str) -> Edit:
    return lambda tensors, config: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Variant:
    """A checkpoint to make.

    Attributes:
        architecture: stock class that it is saved from.
        config: what differs from `SIZES`.
        edit: what is done to its files afterwards.
        disk_prefix: of the base model in its tensors' names; that of the class by default.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    edit: Edit | None = None
    disk_prefix: str | None = None

    @property
    def model_type(self) -> str:
        model_types = {"ViT": "vit", "DeiT": "deit", "Dinov2": "dinov2", "OPT": "opt", "Bert": "bert"}
        return next(value for key, value in model_types.items() if self.architecture.startswith(key))

    @property
    def alone(self) -> bool:
        """Whether it is a base model without a head."""
        return self.architecture.endswith("Model")

    @property
    def auto(self) -> Any:
        auto_classes = {
            "ForImageClassification": "AutoModelForImageClassification",
            "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
            "ForCausalLM": "AutoModelForCausalLM",
            "ForMaskedLM": "AutoModelForMaskedLM",
            "ForPreTraining": "AutoModelForPreTraining",
            "ForSequenceClassification": "AutoModelForSequenceClassification",
            "Model": "AutoModel",
        }
        return getattr(
            transformers, next(auto for end, auto in auto_classes.items() if self.architecture.endswith(end))
        )

    @property
    def swiglu(self) -> bool:
        return bool(self.config.get("use_swiglu_ffn"))

    @property
    def vision(self) -> bool:
        return self.model_type in ("vit", "deit", "dinov2")

    @property
    def mlp(self) -> int:
        """Columns of its MLP."""
        if self.model_type != "dinov2":
            return MLP
        # 2/3 of 4 x 16 is 42.67, rounded down and then up to a multiple of 8.
        return 48 if self.swiglu else 64

    @property
    def tokens(self) -> int:
        """The number of tokens of one sample that `samples` makes."""
        patches = (IMAGE // PATCH) ** 2
        return {"vit": patches + 1, "dinov2": patches + 1, "deit": patches + 2}.get(self.model_type, WINDOW)

    @property
    def disk(self) -> dict[str, str]:
        """Role → path within a block on disk; `block` is what comes before, with its index."""
        prefix = {"opt": "model."}.get(self.model_type, f"{self.model_type}.")
        if self.disk_prefix is not None:
            prefix = self.disk_prefix
        elif self.alone:
            prefix = ""
        if self.model_type == "opt":
            return {"block": prefix + "decoder.layers.{}."} | _OPT_PATHS
        here = {"block": prefix + "encoder.layer.{}."}
        if self.model_type == "bert":
            return here | _BERT_PATHS
        here |= {
            "query": "attention.attention.query",
            "key": "attention.attention.key",
            "value": "attention.attention.value",
            "heads": "attention.output.dense",
        }
        if self.model_type == "dinov2":
            return here | ({"in": "mlp.weights_in", "mlp": "mlp.weights_out"} if self.swiglu else _FC)
        return here | {"in": "intermediate.dense", "mlp": "output.dense"}

    @property
    def modules(self) -> dict[str, str]:
        """Role → path within a block of the stock model."""
        if self.model_type in ("opt", "bert"):
            return self.disk
        here = {"query": "attention.q_proj", "key": "attention.k_proj", "value": "attention.v_proj"}
        here |= {"heads": "attention.o_proj", "attention": "attention"}
        return here | ({"mlp": "mlp.down_proj"} if self.swiglu else _FC)

    @property
    def layers(self) -> str:
        """Path of the list of blocks in the stock model."""
        inside = {"vit": "layers", "deit": "layers", "opt": "decoder.layers"}.get(self.model_type, "encoder.layer")
        prefix = "" if self.alone else {"opt": "model."}.get(self.model_type, f"{self.model_type}.")
        return prefix + inside

    def module(self, block: int, role: str) -> str:
        """Path of a module of the stock model."""
        return f"{self.layers}.{block}.{self.modules[role]}"

    def tensor(self, block: int, role: str, kind: str = "weight") -> str:
        """On-disk name of a tensor."""
        return f"{self.disk['block'].format(block)}{self.disk[role]}.{kind}"


_FC = {"in": "mlp.fc1", "mlp": "mlp.fc2"}
_OPT_PATHS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "heads": "self_attn.out_proj",
    "attention": "self_attn",
    "in": "fc1",
    "mlp": "fc2",
}
_BERT_PATHS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "heads": "attention.output.dense",
    "attention": "attention.self",
    "in": "intermediate.dense",
    "mlp": "output.dense",
}

VARIANTS: dict[str, Variant] = {
    "vit": Variant("ViTForImageClassification"),
    "vit-no-qkv-bias": Variant("ViTForImageClassification", {"qkv_bias": False}),
    "vit-model": Variant("ViTModel"),
    "deit": Variant("DeiTForImageClassification"),
    "deit-teacher": Variant("DeiTForImageClassificationWithTeacher"),
    "deit-model": Variant("DeiTModel"),
    "dinov2-model": Variant("Dinov2Model"),
    "dinov2-classifier": Variant("Dinov2ForImageClassification"),
    "dinov2-swiglu": Variant("Dinov2Model", {"use_swiglu_ffn": True}),
    "dinov2-swiglu-classifier": Variant("Dinov2ForImageClassification", {"use_swiglu_ffn": True}),
    "opt": Variant("OPTForCausalLM"),
    "opt-model": Variant("OPTModel"),
    "opt-no-bias": Variant("OPTForCausalLM", {"enable_bias": False}),
    "opt-350m-like": Variant("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 8}),
    "opt-tied": Variant("OPTForCausalLM", {"tie_word_embeddings": True}),
    "opt-no-prefix": Variant("OPTForCausalLM", {"tie_word_embeddings": True}, _without("model."), ""),
    "bert-mlm": Variant("BertForMaskedLM"),
    "bert-pretraining": Variant("BertForPreTraining", edit=_declare_masked),
    "bert-model": Variant("BertModel"),
    "bert-sequence-classification": Variant("BertForSequenceClassification"),
    "bert-old-names": Variant("BertForMaskedLM", edit=_old_bert),
    "bert-no-prefix": Variant("BertForMaskedLM", edit=_without("bert."), disk_prefix=""),
}
TEXT = [name for name, variant in VARIANTS.items() if not variant.vision]
IMAGES = [name for name, variant in VARIANTS.items() if variant.vision]


def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter random values, norms and layer scales around 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0, std=STD)


@cache
def _model(variant: str) -> PreTrainedModel:
    chosen = VARIANTS[variant]
    config = AutoConfig.for_model(chosen.model_type, **{**SIZES[chosen.model_type], **chosen.config})
    model: PreTrainedModel = getattr(transformers, chosen.architecture)(config).eval()
    randomise(model, sorted(VARIANTS).index(variant))
    return model


def make(folder: Path, variant: str, *, dtype: torch.dtype = torch.float32, shard: str | None = None) -> Path:
    """Save a variant with what turns data into its input; `shard` is the largest shard's size."""
    chosen = VARIANTS[variant]
    model = copy.deepcopy(_model(variant)).to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    if chosen.edit is not None:
        edit_files(folder, chosen.edit)
    if chosen.vision:
        write_processor(folder, size={"height": IMAGE, "width": IMAGE})
    else:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def edit_files(folder: Path, edit: Edit) -> None:
    """Rewrite the tensors and the config of a folder with one weights file."""
    config = json.loads((folder / "config.json").read_text())
    tensors = edit(load_file(folder / "model.safetensors"), config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True, eq=False)
class Pixels:
    """Random images as a model reads them: `values` (N, 3, H, W)."""

    values: Tensor
    tokens: int

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.values.numpy().tobytes()).hexdigest()

    def batch(self, rows: slice) -> dict[str, Tensor]:
        return {"pixel_values": self.values[rows]}


def samples(variant: str, count: int = 24, seed: int = 5) -> Samples:
    chosen = VARIANTS[variant]
    if not chosen.vision:
        return TokenWindows(random_windows(count, WINDOW, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    return Pixels(torch.randn(count, 3, IMAGE, IMAGE, generator=generator), chosen.tokens)


FOR_CORP: tuple[Collect, ...] = ("moments", "gram", "logits")
"""All that `recipe` looks at: no gradients, which take longest."""


def calibrate(
    folder: Path, out: Path, data: Samples, *, folds: int = 1, collect: tuple[Collect, ...] | None = None
) -> Statistics:
    """Measure statistics as the command does, except for effects that are measured."""
    model = Model.open(folder)
    kinds = list_collected_by_default(model) if collect is None else collect
    how: dict[str, Any] = {"device": torch.device("cpu"), "compute_dtype": torch.float32}

    def finish(statistics: Statistics) -> None:
        if "fisher" in kinds:
            add_gradients(model, statistics, data, **how)

    return measure_statistics(model, data, out, seed=0, folds=folds, collect=kinds, finish=finish, **how)


STRENGTH = 0.1
"""Relative λ of methods that have one."""
DEFAULTS = {
    "qk": {"score": "logit-energy", "compensation": {"method": "logit", "lambda": STRENGTH}},
    "rotary": {"score": "logit-energy", "compensation": {"method": "factors", "lambda": STRENGTH}},
    "queries": {"score": "corp", "compensation": {"method": "affine", "lambda": STRENGTH}},
    "heads": {"score": "corp", "compensation": {"method": "affine", "lambda": STRENGTH}},
    "values": {"score": "principal", "compensation": {"method": "affine", "lambda": STRENGTH}},
    "mlp": {"score": "corp", "compensation": {"method": "affine", "lambda": STRENGTH}},
    "dense": {"score": "corp", "compensation": {"method": "affine", "lambda": STRENGTH}},
    "pooling": {"score": "corp", "compensation": {"method": "affine", "lambda": STRENGTH}},
    "experts": {"score": "routed-energy"},
    "shared": {"score": "corp", "compensation": {"method": "affine", "lambda": STRENGTH}},
}


def recipe(ratios: Mapping[str, float], *, methods: Mapping[str, Any] | str | None = None, **top: Any) -> FullRecipe:
    """Ratio by space, CORP's compensation with λ 0.1 unless `methods` says otherwise for a space or for all.

    A method is a name, or the whole mapping of a compensation.
    """
    spaces = {}
    for space, ratio in ratios.items():
        settings: dict[str, Any] = DEFAULTS[space] | {"ratio": ratio}
        method = methods.get(space) if isinstance(methods, Mapping) else methods
        if isinstance(method, str):
            strength = {"lambda": STRENGTH} if method in WITH_STRENGTH or method in FITS_LOGITS else {}
            settings["compensation"] = {"method": method} | strength
        elif method is not None:
            settings["compensation"] = method
        spaces[space] = settings
    return FullRecipe.model_validate({"version": 1, "name": "test", "container": "any", "spaces": spaces, **top})


def request_on(
    folder: Path,
    full_recipe: FullRecipe,
    statistics: Statistics | None = None,
    live: Samples | None = None,
    *,
    folds: int = 1,
    **more: Any,
) -> Job:
    samples = None if live is None else LiveSamples(live, folds, torch.float32)
    return Job(Model.open(folder), full_recipe, statistics, samples, **more)


def job_on(folder: Path, full_recipe: FullRecipe, *given: Any, **more: Any) -> Prepared:
    """The same, settled."""
    return prepare_plan(request_on(folder, full_recipe, *given, **more))


def stock(folder: Path, variant: str, **options: Any) -> PreTrainedModel:
    """Load with stock transformers alone, and refuse a load that left anything out."""
    model, info = VARIANTS[variant].auto.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, **options
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    loaded: PreTrainedModel = model.eval()
    return loaded


@cache
def load_stock_once(folder: Path, variant: str) -> PreTrainedModel:
    """The stock model of a dense checkpoint, loaded once for all who look at it and leave it as it is."""
    return stock(folder, variant)


@torch.inference_mode()
def outputs(model: nn.Module, data: Samples) -> dict[str, Tensor]:
    """Every tensor a model returns: logits of each head, hidden states, what is pooled."""
    batch = data.batch(slice(len(data)))
    options = {"use_cache": False} if "input_ids" in batch and hasattr(model, "generate") else {}
    tensors = {k: v for k, v in model(**batch, **options).items() if isinstance(v, Tensor)}
    assert tensors
    return tensors


def assert_same_outputs(a: nn.Module, b: nn.Module, data: Samples, *, tolerance: float = 1e-4) -> None:
    """Two models return the same tensors."""
    ours, theirs = outputs(a, data), outputs(b, data)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.float().std() > 1e-3, f"{name} says nothing"
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=tolerance, atol=tolerance, msg=None)


# ---- a whole model, watched and pruned by hand ---------------------------------------------------------------------


@torch.no_grad()
def watch(
    model: nn.Module, data: Samples, *, inputs: Iterable[str] = (), results: Iterable[str] = ()
) -> dict[str, Array]:
    """Input or output of modules by path: (samples, tokens, width) float64.

    OPT folds samples and tokens together before its MLP, samples first: they are cut apart again.
    """
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for path in inputs:
        seen[path] = []
        hook = lambda _, args, path=path: seen[path].append(args[0])  # noqa: E731
        handles.append(model.get_submodule(path).register_forward_pre_hook(hook))
    for path in results:
        seen[path] = []
        after = lambda _, args, out, path=path: seen[path].append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
        handles.append(model.get_submodule(path).register_forward_hook(after))
    model(**data.batch(slice(len(data))))
    for handle in handles:
        handle.remove()
    assert all(len(batches) == 1 for batches in seen.values())
    return {
        path: batches.reshape(len(data), -1, batches.shape[-1]).double().numpy() for path, (batches,) in seen.items()
    }


STRENGTHLESS: dict[str, Any] = {
    "none": closed_forms.none,
    "bias": closed_forms.bias,
    "rotation": closed_forms.rotation,
    "rotation-scale": closed_forms.rotation_scale,
    "centred-rotation": closed_forms.centred_rotation,
    "least-squares": closed_forms.least_squares,
}
WITH_STRENGTH: dict[str, Any] = {
    "ridge": closed_forms.ridge,
    "affine": closed_forms.affine,
    "grail": closed_forms.grail,
}


def columns_of(units: Iterable[int], per: int) -> list[int]:
    return [unit * per + i for unit in units for i in range(per)]


def heads_of(projection: Array) -> list[Array]:
    """(samples, tokens, heads x dimensions) cut by head, each (samples, tokens, dimensions)."""
    return np.split(projection, projection.shape[2] // HEAD_DIM, axis=2)


def pairs_of(queries: Array, keys: Array) -> list[logits.Samples]:
    """Q_b and K_b of every sample, by head."""
    return [list(zip(q, k, strict=True)) for q, k in zip(heads_of(queries), heads_of(keys), strict=True)]
