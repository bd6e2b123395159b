"""Parts of composites, pruned in place, against the whole composite in float64; all other bytes stay."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.job import Job
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.statistics.measurement import list_collected_by_default, measure_statistics
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.composites import Composite, load_composite
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.skeleton import quiet_transformers
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.vocabulary.smaller_checkpoint import vocabulary_tensors
from ckpt_prune.verification.verify import verify
from tests.encoders import DEFAULTS, STRENGTH, Pixels, randomise
from tests.evaluation.tiny import VOCAB, random_windows, tiny_tokenizer
from tests.pairs import choose_cases
from tests.refusals import refusal

from .models import BLOCKS, WINDOW
from .whole import Whole, assert_same_outputs, outputs

COMPUTED = 5e-4
IMAGE = 5
"""The token that stands for one patch of an image."""
PATCHES = 9
MELS, FRAMES = 5, 14
START = 6
"""What stands before an image that is cut up."""
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EYES = {"hidden_size": 16, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "image_size": 12, "patch_size": 4}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}
QWEN_EYES = {"depth": 2, "hidden_size": 16, "num_heads": 4, "patch_size": 4}
DEEP_EYES = QWEN_EYES | {"intermediate_size": 24, "out_hidden_size": 16, "num_position_embeddings": 9}
TOWER = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    "intermediate_size": 22,
    "max_position_embeddings": 16,
    "projection_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAVA = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": EYES | {"model_type": "dinov2", "mlp_ratio": 2},
    "image_token_index": IMAGE,
    "vision_feature_layer": -1,
}
BACKBONE = EYES | {
    "model_type": "dinov2",
    "mlp_ratio": 4,
    "out_indices": [0, 1, 2],
    "image_size": 16,
}
DEPTH = {
    "backbone_config": BACKBONE | {"reshape_hidden_states": False},
    "neck_hidden_sizes": [4, 6, 8],
    "reassemble_factors": [2, 1, 0.5],
    "fusion_hidden_size": 8,
}
CLIP = {
    "text_config": TOWER,
    "vision_config": EYES | {"intermediate_size": 24, "projection_dim": 8},
    "projection_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dpt": DEPTH | {"is_hybrid": False},
    "depth_anything": DEPTH | {"reassemble_hidden_size": 16, "patch_size": 4},
    "upernet": {
        "backbone_config": BACKBONE,
        "hidden_size": 8,
        "pool_scales": [1, 2],
        "auxiliary_channels": 4,
        "auxiliary_in_channels": 16,
        "num_labels": 5,
    },
    "clip": CLIP,
    "metaclip_2": CLIP,
    "gemma3": {
        "text_config": TEXT | {"head_dim": 8, "sliding_window": 5},
        "vision_config": EYES | {"intermediate_size": 24, "vision_use_head": False},
        "mm_tokens_per_image": PATCHES,
        "image_token_id": IMAGE,
    },
    "gemma4": {
        "text_config": TEXT
        | {
            **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "num_hidden_layers": 4, "pad_token_id": 0},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 4, "use_bidirectional_attention": "vision"},
        },
        "vision_config": {key: EYES[key] for key in EYES if key != "image_size"}
        | {"intermediate_size": 24, "head_dim": 4, "num_key_value_heads": 2, "pooling_kernel_size": 2},
    },
    "llava": LLAVA,
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 9, "pad_token_id": 0},
        "vision_config": EYES
        | {"model_type": "siglip_vision_model", "intermediate_size": 24, "vision_use_head": False},
        "projection_dim": 16,
        "image_token_id": IMAGE,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN_EYES
        | {"intermediate_size": 24, "out_hidden_size": 16, "fullatt_block_indexes": [1], "window_size": 8},
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
    },
    "qwen2_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN_EYES | {"embed_dim": 16},
    },
    "aya_vision": {
        "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 5},
        "vision_config": EYES | {"model_type": "siglip_vision_model", "intermediate_size": 24},
    },
    "idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": EYES | {"intermediate_size": 24}},
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": EYES | {"intermediate_size": 24, "image_size": [12, 12], "patch_size": [4, 4]},
    },
    "llava_next": LLAVA | {"vision_config": EYES | {"model_type": "clip_vision_model", "intermediate_size": 24}},
    "minimax_m3_vl": {
        "text_config": TEXT
        | {
            "head_dim": 8,
            "rotary_dim": 4,
            "shared_intermediate_size": 22,
            "num_local_experts": 4,
            "mlp_layer_types": ["sparse"] * BLOCKS,
        },
        "vision_config": EYES | {"intermediate_size": 24},
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 8},
        "vision_config": EYES | {"model_type": "pixtral", "intermediate_size": 24, "head_dim": 4},
    },
    "paddleocr_vl": {
        "text_config": TEXT
        | {"head_dim": 8, "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1]}},
        "vision_config": EYES | {"intermediate_size": 24},
    },
    "molmo2": {
        "text_config": TEXT | {"head_dim": 8, "additional_vocab_size": 3},
        "vision_config": EYES | {"image_size": [12, 12], "num_hidden_layers": 3},
        "adapter_config": {"vision_feature_layer": [-1], "intermediate_size": 24, "text_hidden_size": 16},
    },
    "qwen3_5": {
        "text_config": TEXT
        | {
            **MROPE,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": DEEP_EYES,
    },
    "qwen3_vl": {
        "text_config": TEXT | MROPE | {"head_dim": 8},
        "vision_config": DEEP_EYES | {"deepstack_visual_indexes": [1]},
    },
    "siglip": {
        "architectures": ["SiglipForImageClassification"],  # of which nothing reads what is pooled
        "vision_config": EYES | {"intermediate_size": 24},
    },
    "smolvlm": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": EYES | {"intermediate_size": 24}},
    "whisper": {
        "vocab_size": VOCAB,
        "d_model": 16,
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES // 2,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": None,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), BLOCKS),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 22),
    },
}


def composite_of(config: PreTrainedConfig) -> Composite:
    return load_composite(config.to_dict())


@dataclass(frozen=True)
class PartCase:
    model_type: str
    part: str
    ratios: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return f"{self.model_type}-{self.part}"

    @cached_property
    def model(self) -> PreTrainedModel:
        config = AutoConfig.for_model(self.model_type, **CONFIGS[self.model_type])
        model = getattr(transformers, composite_of(config).architecture)(config).eval()
        randomise(model, 7)
        return model

    def samples(self, count: int = 16, seed: int = 5) -> Samples:
        if self.part == "text":
            return TokenWindows(random_windows(count, WINDOW, seed=seed))
        if self.part == "encoder":
            return Sounds(torch.randn(count, MELS, FRAMES, generator=torch.Generator().manual_seed(seed)))
        pixels = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
        return Pixels(pixels, PATCHES + (self.model_type != "gemma3"))  # SigLIP has no token for the class

    def shown(self) -> Samples:
        """Draw what the whole model reads: text, with an image or a sound in it where a few numbers make one."""
        windows = random_windows(4, WINDOW, seed=9).masked_fill_(torch.tensor(False), 0)
        windows[windows == IMAGE] = IMAGE + 1
        if self.model_type == "siglip":
            return self.samples(4, seed=9)
        if self.model_type == "whisper":
            return Heard(windows, torch.randn(4, MELS, FRAMES, generator=torch.Generator().manual_seed(9)))
        if self.model_type.startswith("qwen") or self.model_type in NO_IMAGES:
            return TokenWindows(windows)
        if "clip" not in self.model_type:
            windows[:, 1 : 1 + PATCHES] = IMAGE
        return Shown(windows, torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(9)))


class Shown(TokenWindows):
    """Windows with an image each."""

    def __init__(self, windows: Tensor, pixels: Tensor) -> None:
        super().__init__(windows)
        self._pixels = pixels

    def batch(self, part: slice) -> dict[str, Tensor]:
        return super().batch(part) | {"pixel_values": self._pixels[part]}


class Sounds:
    """Features of sounds."""

    tokens, fingerprint = FRAMES // 2, "sounds"

    def __init__(self, features: Tensor) -> None:
        self._features = features

    def __len__(self) -> int:
        return len(self._features)

    def batch(self, part: slice) -> dict[str, Tensor]:
        return {"input_features": self._features[part]}


class Heard(Sounds):
    """Sounds with the text that is said."""

    def __init__(self, windows: Tensor, features: Tensor) -> None:
        super().__init__(features)
        self._windows = windows

    def batch(self, part: slice) -> dict[str, Tensor]:
        return super().batch(part) | {"decoder_input_ids": self._windows[part]}


MLP = (("mlp", 0.25),)
CASES = [
    PartCase("clip", "text", MLP),
    PartCase("clip", "vision", MLP),
    PartCase("metaclip_2", "vision", MLP),
    PartCase("gemma3", "text", (("heads", 0.5), *MLP)),
    PartCase("gemma4", "text", MLP),
    PartCase("paligemma", "text", (("heads", 0.5), *MLP)),
    PartCase("llava", "text", (("heads", 0.5), *MLP)),
    PartCase("llava", "vision", (("heads", 0.5), ("mlp", 0.5))),
    PartCase("qwen2_5_vl", "text", MLP),
    PartCase("qwen2_vl", "text", MLP),
    PartCase("whisper", "encoder", MLP),
    PartCase("siglip", "vision", (*MLP, ("pooling", 0.25))),
    PartCase("aya_vision", "text", MLP),
    PartCase("idefics3", "text", (("heads", 0.5), *MLP)),
    PartCase("internvl", "text", MLP),
    PartCase("llava_next", "text", (("heads", 0.5), *MLP)),
    PartCase("minimax_m3_vl", "text", (("heads", 0.5), ("shared", 0.25))),
    PartCase("mistral3", "text", (("heads", 0.5), *MLP)),
    PartCase("molmo2", "text", MLP),
    PartCase("qwen3_5", "text", MLP),
    PartCase("qwen3_vl", "text", (("heads", 0.5), *MLP)),
    PartCase("smolvlm", "text", (("heads", 0.5), *MLP)),
    PartCase("dpt", "backbone", (("heads", 0.5), ("mlp", 0.5))),
    PartCase("depth_anything", "backbone", (("heads", 0.5), ("mlp", 0.5))),
    PartCase("upernet", "backbone", (("mlp", 0.5),)),
]
NO_IMAGES = (
    "aya_vision",
    "gemma4",
    "idefics3",
    "internvl",
    "llava_next",
    "minimax_m3_vl",
    "mistral3",
    "molmo2",
    "smolvlm",
)
"""Composites that are run on text alone here: their own classes cut images, or want sizes with them."""


class InComposite(Whole):
    """A part of a composite, in it."""

    def __init__(self, case: PartCase, part: Any) -> None:
        self.family, self.kept = part.family, {}
        self.whole = case.model.double()
        self.whole.set_experts_implementation("eager")  # the default one has no float64
        described = composite_of(case.model.config).part(case.part)
        self._outer = next(iter(described.modules.items()))
        self.model: Any = self.whole if self._outer[1] else self.whole.get_submodule(self._outer[0])
        self._paths = module_paths(part.family)
        ratio = dict(case.ratios).__getitem__
        self.case: Any = SimpleNamespace(
            units=lambda space: part.units(space, part.blocks - 1),
            blocks=part.blocks,
            spaces_of=part.spaces,
            ratio=ratio,
            config=part.config,
        )

    def path(self, block: int, module: str) -> str:
        inner = super().path(block, module)
        outer, prefix = self._outer
        return f"{outer}.{inner.removeprefix(f'{prefix}.')}" if prefix else inner


ALWAYS = ("clip-text", "gemma3-text", "llava-vision", "siglip-vision", "whisper-encoder")


@pytest.mark.parametrize("case", choose_cases(CASES, lambda case: str(case) in ALWAYS), ids=str)
def test_equals_the_whole_composite_pruned_by_hand(case: PartCase, tmp_path: Path) -> None:
    folder, out = tmp_path / "dense", tmp_path / "out"
    with quiet_transformers():
        case.model.save_pretrained(folder, max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(folder)
    if case.model_type == "molmo2":
        move_rows(folder)
    model = open_model(str(folder), Opening(part=case.part))
    cpu, data = torch.device("cpu"), case.samples()
    statistics = measure_statistics(
        model,
        data,
        tmp_path / "s",
        seed=0,
        folds=2,
        collect=list_collected_by_default(model),
        device=cpu,
        compute_dtype=torch.float32,
    )
    spaces = {
        space: DEFAULTS[space] | {"ratio": ratio, "compensation": {"method": "ridge", "lambda": STRENGTH}}
        for space, ratio in case.ratios
    }
    recipe = FullRecipe.model_validate({"version": 1, "name": "test", "target": "dense", "spaces": spaces})
    report = run_job(Job(model, recipe, statistics), out).report.data()
    assert report["part"] == case.part

    composite = InComposite(case, model)
    dense_bytes = read_tensors(folder)
    composite.prune(data, dict.fromkeys(dict(case.ratios), "ridge"))
    assert {(site["block"], site["space"]): site["kept"] for site in report["sites"]} == composite.kept
    shown = case.shown()
    assert_same_outputs(outputs(ckpt_prune.load(out), shown), outputs(composite.whole, shown), COMPUTED)

    # What is not in the part's blocks is what it was, byte for byte.
    written, consumers = read_tensors(out), model.family.linears
    assert written.keys() == dense_bytes.keys()
    inside = {model.checkpoint.within.names[name]: name for b in range(model.blocks) for name in model.block_names(b)}  # type: ignore[union-attr]
    for name, tensor in written.items():
        if not any(f".{module}." in inside.get(name, "") for module in consumers):
            assert torch.equal(tensor, dense_bytes[name]), name
    checks = {check.name: check for check in verify(out, folder)}
    assert all(check.passed for name, check in checks.items() if name != f"sparsity ({case.part})"), checks
    assert "other parts" in checks


def test_a_tower_is_masked(tmp_path: Path) -> None:
    case, folder = PartCase("gemma3", "vision", MLP), tmp_path / "dense"
    with quiet_transformers():
        case.model.save_pretrained(folder)
    model = open_model(str(folder), Opening(part="vision"))
    mask = {"version": 1, "name": "test", "mask": {"method": "magnitude", "pattern": "2:4"}}
    report = run_job(Job(model, FullRecipe.model_validate(mask)), tmp_path / "out").report.data()
    masked, before = {linear["weight"] for linear in report["linears"]}, read_tensors(folder)
    assert model.checkpoint.within is not None
    names = {model.checkpoint.within.names[name] for name in masked}
    for name, tensor in read_tensors(tmp_path / "out").items():
        zeros = (tensor == 0).float().mean()
        assert zeros == 0.5 if name in names else torch.equal(tensor, before[name])
    assert all(check.passed for check in verify(tmp_path / "out", folder))


def move_rows(folder: Path) -> None:
    """Write rows of tokens and of added tokens as published files have them: transformers saves two halves."""
    tensors = read_tensors(folder)
    first, second = (f"model.transformer.wte.{name}embedding" for name in ("", "new_"))
    tensors[first], tensors[second] = torch.cat([tensors[first], tensors[second]]).split([VOCAB, 3])
    for file in [*folder.glob("*.safetensors*")]:
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_an_embedding_in_two_tensors_keeps_its_tokens(tmp_path: Path) -> None:
    with quiet_transformers():
        PartCase("molmo2", "text", MLP).model.save_pretrained(tmp_path)
    reason = "molmo2_text ties wte.new_embedding to the number of its tokens: the vocabulary stays whole"
    assert refusal(vocabulary_tensors, open_model(str(tmp_path), Opening(part="text"))) == reason


def test_modules_of_parts_are_those_of_their_class() -> None:
    for case in CASES:
        described = composite_of(case.model.config).part(case.part)
        modules = dict[str, nn.Module](case.model.named_modules())
        assert described.modules.keys() <= modules.keys()


def test_a_model_whose_blocks_are_its_own_has_no_backbone(tmp_path: Path) -> None:
    """A DPT with a ViT of its own: as published for MiDaS."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 8}
    neck = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [4, 4, 4, 4], "fusion_hidden_size": 8}
    config = transformers.DPTConfig(**sizes, **neck, image_size=16, patch_size=4, is_hybrid=False)
    with quiet_transformers():
        transformers.DPTForDepthEstimation(config).save_pretrained(tmp_path / "dpt")
    with pytest.raises(UserError) as caught:
        open_model(str(tmp_path / "dpt"), Opening(part="backbone"))
    assert str(caught.value) == "this dpt has no backbone_config: its blocks are its own, and no part of it is"
