"""A tiny random model of every family, class and variant, from its JSON file and transformers' own config alone."""

import json
import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.model.descriptions import OUTSIDE_KEY, known_families, load_family, parse_family, variants_of
from ckpt_prune.model.discovery.discover import discover
from ckpt_prune.model.family import Family
from ckpt_prune.model.skeleton import Names, build_skeleton
from ckpt_prune.model.spaces import recipe_space
from tests.encoders import Pixels, randomise
from tests.evaluation.tiny import BOS, EOS, VOCAB, random_windows, tiny_tokenizer
from tests.images import write_processor

BLOCKS, WINDOW = 2, 12
IMAGE, PATCH = 12, 4
DIMENSIONS = {"hidden": 16, "query_heads": 4, "kv_heads": 2, "mlp": 22, "dense": 26, "experts": 4, "shared": 12}
ODD_HEAD = 8
"""A head width that is not the hidden size by the number of heads, for configs that accept one."""
MULTIPLE = 4
SHARED = {"tie_word_embeddings": False, "pad_token_id": None, "num_labels": 2}
TEXT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "max_seq_len": 32,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "rotary_dim": 2,
}
PICTURES = {"image_size": IMAGE, "patch_size": PATCH}
SWITCHES: dict[str, Any] = {
    "residual_multiplier": 0.6,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.0,
    "logit_scale": 0.7,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "no_rope_layers": [1, 0],
    "num_register_tokens": 3,
}
"""Config keys that change the function, at values that show; where the config class knows them."""
OFFSET = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm", "mpnet")
"""Families that count positions from behind that of their padding token."""
LATENT = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_shared_experts": 2,
}
"""Latent attention in heads of a few dimensions. Every block has experts; `LED` has one before them with an mlp."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "deberta-v2": {
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "electra": {"embedding_size": 8},
    "deepseek_v3": LATENT | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 12},
    "deepseek_v2": LATENT | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": None},
    **{name: {"pad_token_id": 1} for name in OFFSET},
}
"""What the published config.json of a family says, and its class's defaults do not."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
"""Where single layers have a window: one that is shorter than the samples, in the first of them."""


@dataclass(frozen=True)
class Case:
    """One class of one family.

    Attributes:
        model_type: of the family.
        architecture: stock class.
        variant: config key that is true and changes the description, or None.
        blocks: number of blocks.
        settings: more of the config, as JSON.
    """

    model_type: str
    architecture: str
    variant: str | None = None
    blocks: int = BLOCKS
    settings: str = "{}"

    def __str__(self) -> str:
        shallow = None if self.blocks == BLOCKS else str(self.blocks)
        led = "led" if "first_k" in self.settings else None
        return "-".join(filter(None, (self.model_type, self.variant, self.architecture, shallow, led)))

    @cached_property
    def described(self) -> Family:
        if self.model_type not in FOUND:
            return load_family(self.model_type, self.variant).of(self.architecture)
        return parse_family(json.dumps(found_description(self.model_type)))

    @cached_property
    def family(self) -> Family:
        """With the spaces that some block has, of every expert one."""
        if self.described.experts is None:
            return self.described
        family = self.described.with_config(self.config)
        found = {space for block in range(self.blocks) for space in self._spaces_of(family, block)}
        return family.model_copy(
            update={"spaces": {name: family.spaces[name] for name in family.spaces if name in found}}
        )

    def spaces_of(self, block: int) -> list[str]:
        """Return the spaces of a block."""
        return self._spaces_of(self.family, block)

    def _spaces_of(self, family: Family, block: int) -> list[str]:
        is_dense = f"{family.layers}.{block}.mlp.gate_proj.weight" in self._names
        absent = ("mlp", "shared", "experts") if is_dense else ("dense",)
        absent = absent if family.experts is not None else () if block == self.blocks - 1 else ("pooling",)
        return [name for name in family.spaces if recipe_space(name) not in absent]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(build_skeleton(self.config, self.architecture).state_dict())

    @cached_property
    def config(self) -> PreTrainedConfig:
        """A tiny one, with an odd head width where the class takes it."""
        family = self.described
        if not family.dimensions["head_dim"]:
            return self._config()
        odd = self._config(head_dim=ODD_HEAD)
        try:
            skeleton = build_skeleton(odd, self.architecture)
        except UserError:
            return self._config()
        value = Names(skeleton).shape(family.tensor(0, family.attention.output))
        assert value is not None
        fits = value[1] == ODD_HEAD * DIMENSIONS["query_heads"] and family.dimension(odd, "head_dim") == ODD_HEAD
        return odd if fits else self._config()

    def _config(self, **changes: int) -> PreTrainedConfig:
        family = self.described
        config = AutoConfig.for_model(self.model_type)
        values: dict[str, Any] = {k: v for k, v in (SHARED | TEXT | PICTURES).items() if hasattr(config, k)}
        sizes = DIMENSIONS | {"layers": self.blocks}
        for name, keys in family.dimensions.items():
            if keys and name in sizes and (name != "kv_heads" or keys[0] not in family.dimensions["query_heads"]):
                values[keys[0]] = sizes[name]
        values |= {multiple.key: MULTIPLE for multiple in family.multiples.values()}
        values |= {key: value for key, value in SWITCHES.items() if getattr(config, key, None) is not None}
        if getattr(config, "layer_types", None) and family.sliding_window is None:
            values |= MIXED
        values |= {k: values[k][: self.blocks] for k in ("layer_types", "no_rope_layers") if k in values}
        if "partial_rotary_factor" in (getattr(config, "rope_parameters", None) or {}):
            values["partial_rotary_factor"] = 0.5
        if family.sliding_window:
            values[family.sliding_window] = False if isinstance(getattr(config, family.sliding_window), bool) else None
        values |= {variant: variant == self.variant for variant in variants_of(self.model_type)}
        values |= {} if family.experts is None else {family.experts.chosen: 2}
        values |= PUBLISHED.get(self.model_type, {}) | json.loads(self.settings)
        return AutoConfig.for_model(self.model_type, **values, **changes)

    @property
    def kv_heads(self) -> int:
        return self.family.dimension(self.config, "kv_heads")

    def units(self, space: str) -> int:
        return next(s for name, s in self.family.spaces.items() if name == space).count(
            lambda name: self.family.dimension(self.config, name)
        )

    @property
    def ratios(self) -> dict[str, float]:
        """By space that all promises are held for.

        Without values, which no stock class has narrower: `values` has these, too. Rotary pairs and whole experts have
        tests of their own (`test_rotary`, `tests/stages/spaces/test_experts.py`).
        """
        return {name: share for name, share in self.values.items() if name != "values"}

    @property
    def values(self) -> dict[str, float]:
        """The same with values, where these can go."""
        described = self.family if self.described.experts else self.described.with_config(self.config)
        names = [
            name
            for name, space in described.spaces.items()
            if space.whole is None and space.kind not in ("rotary", "experts")
        ]
        return {space: self.ratio(space) for space in map(recipe_space, names)}

    def ratio(self, space: str) -> float:
        """A head or KV group goes, half of its queries, and of other units a quarter or a half."""
        ratios = {
            # The heads of deepseek_v2 divide the hidden size.
            "heads": (2 if self.model_type == "deepseek_v2" else 1) / self.units("heads") if space == "heads" else 0,
            "queries": 0.5,
            "mlp": 0.25,
            "dense": 0.25,
            "shared": 0.25,
            "pooling": 0.25,
            "qk": 0.5,
            "rotary": 0.5,
            "values": 0.5,
        }
        return ratios[space]

    def model(self) -> PreTrainedModel:
        """With random weights of which none is left out unnoticed."""
        model: PreTrainedModel = getattr(transformers, self.architecture)(self.config).eval()
        if self.family.experts is not None:
            model.set_experts_implementation("eager")  # the default one has no float64
        randomise(model, zlib.crc32(str(self).encode()))
        return model

    @property
    def published_config(self) -> dict[str, Any]:
        """The config.json of its checkpoint."""
        values: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        values["architectures"] = [self.architecture]
        return values | ({OUTSIDE_KEY: found_description(self.model_type)} if self.model_type in FOUND else {})

    def write(self, folder: Path) -> Path:
        """Save the model as it is published: by the stock class, with a tokenizer or image processor."""
        with quiet_transformers():
            self.model().save_pretrained(folder)
        if self.model_type in FOUND:
            path = folder / "config.json"
            with_description = json.loads(path.read_text()) | {OUTSIDE_KEY: found_description(self.model_type)}
            path.write_text(json.dumps(with_description))
        if self.family.modality == "image":
            write_processor(folder, size={"height": IMAGE, "width": IMAGE})
        else:
            tiny_tokenizer().save_pretrained(folder)
        return folder

    def samples(self, count: int | None = None, seed: int = 5) -> Samples:
        """Draw what the class reads: by default enough that every expert sees more tokens than it has columns."""
        if count is None:
            count = 16 if self.family.experts is None else 48
        if self.family.modality == "text":
            return TokenWindows(random_windows(count, WINDOW, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        registers = getattr(self.config, self.family.registers) if self.family.registers else 0
        tokens = (IMAGE // PATCH) ** 2 + self.family.special_tokens + registers
        return Pixels(torch.randn(count, 3, IMAGE, IMAGE, generator=generator), tokens)

    def block(self, model: nn.Module, index: int) -> nn.Module:
        return model.get_submodule(f"{self.family.layers}.{index}")


FOUND = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
"""Types without a description, whose spaces are found: attention whose keys and values are made of a latent vector."""


@cache
def found_description(model_type: str) -> dict[str, Any]:
    """Return the description that discovery finds, which outputs carry in their config."""
    config = AutoConfig.for_model(model_type, **PUBLISHED[model_type] | {"first_k_dense_replace": 1})
    return discover(config.to_dict() | {"architectures": [FOUND[model_type]]}).description


def cases() -> list[Case]:
    """Every class of every family, in every variant, and of types that are found."""
    described = [
        Case(model_type, architecture, variant)
        for model_type in known_families()
        for variant in (None, *variants_of(model_type))
        for architecture in load_family(model_type, variant).architectures
    ]
    return described + [Case(*found) for found in FOUND.items()]


CASES = cases()
LED = Case("deepseek_v3", "DeepseekV3ForCausalLM", settings='{"first_k_dense_replace": 1, "n_group": 2}')
"""Its first block has one mlp in place of experts, and its router takes these in two groups."""


RENAMED = (
    "roberta",
    "distilbert",
    "xlm-roberta",
    "camembert",
    "data2vec-text",
    "ernie",
    "electra",
    "roberta-prelayernorm",
    "xlm-roberta-xl",
)
"""Families whose blocks have the same linear modules as BERT's, by other names: they are described, and pruned once."""
ALIKE = {
    "mixtral": "qwen3_moe",
    "olmoe": "qwen3_moe",
    "granitemoe": "qwen3_moe",
    "qwen2_moe": "qwen3_moe",
    "deepseek_v2": "deepseek_v3",
    "qwen2": "mistral",
    "ernie4_5": "cohere2",
    "granite": "llama",
    "gemma": "gemma3_text",
    "gemma2": "gemma3_text",
    "olmo2": "gemma3_text",
    "olmo3": "gemma3_text",
    "exaone4": "gemma3_text",
    "smollm3": "cohere2",
    "cohere": "cohere2",
    "starcoder2": "stablelm",
    "nemotron": "stablelm",
    "phi": "stablelm",
    "glm": "cohere2",
    "glm4": "cohere2",
    "gptj": "cohere2",
    "phi3": "mistral",
    "gpt_neox": "gpt2",
    "falcon": "cohere2",
    "mpt": "bloom",
    "deit": "vit",
    **dict.fromkeys(RENAMED, "bert"),
    "mpnet": "bert",
    "deberta-v2": "bert",
    "modernbert": "cohere2",
    "dinov2_with_registers": "dinov2",
    "beit": "dinov2",
    "clip_vision_model": "siglip_vision_model",
    "clip_text_model": "siglip_vision_model",
}
"""Family → one that stands for it where a promise takes long: it has whatever parts the blocks of the first have."""


@cache
def first_cases() -> list[Case]:
    """One class of every family and variant."""
    by_class: dict[tuple[str, str | None], Case] = {}
    for case in CASES:
        by_class.setdefault((case.model_type, case.variant), case)
    return list(by_class.values())


FIRST = [case for case in first_cases() if case.model_type not in RENAMED]
"""What promises that take longest are held for."""
LONG = [case for case in CASES if case.model_type not in ALIKE or case in FIRST]
"""What promises that take longer are held for: of a family that another stands for, one class of each variant."""


def unlike_cases() -> list[Case]:
    """List the cases of `FIRST` that no other family stands for."""
    return [case for case in FIRST if case.model_type not in ALIKE]
