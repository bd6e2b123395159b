"""Writes ckpt_prune/model/FAMILIES.md, the page of supported families, from their descriptions.

`python tools/families.py sweep [TYPE...]` first looks for the spaces of every type of model of text, or of images
that it puts into classes, that the installed transformers has (or of these types): it makes a tiny random model of
each, prunes it by `ridge` as a command does, verifies the output, and keeps what came of it in tools/discovered.json.
It takes about half an hour of processor time.
"""

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not that which is installed

from ckpt_prune.common.errors import UserError
from ckpt_prune.model import descriptions
from ckpt_prune.model.composites import (
    count_stages,
    encoder_decoders,
    is_composite,
    is_encoder_decoder,
    known_composites,
    load_composite,
    shipped_composite,
)
from ckpt_prune.model.descriptions import families_with_experts, known_families, load_family, variants_of
from ckpt_prune.model.family import Family

DISCOVERED = Path(__file__).resolve().parent / "discovered.json"
ROOM = DISCOVERED.parents[1] / "ckpt_prune" / "model"
PAGE = ROOM / "FAMILIES.md"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMPASS = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_INDEXER = {f"indexer_{key}": value for key, value in (("n_heads", 8), ("kv_heads", 1), ("head_dim", 256))}
_INDEXER |= {"indexer_budget": 2048, "indexer_compress_ratio": 4}
PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31}},
    "emu3": {"vocabulary_map": {"<image>": 90, "<|visual token 000000|>": 91}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [22, 22, 20]}}},
    "esm": {"mask_token_id": 32, "pad_token_id": 1},
    "gemma4": {"text_config": {"num_hidden_layers": 42, "num_kv_shared_layers": 18}},  # as E4B has it
    "granite4_vision": {"deepstack_layer_map": [[-2, 0], [-1, 2]], "downsample_rate": "1/2"},
    **{name: {"decoder_start_token_id": 0} for name in ("longt5", "t5", "umt5")},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "lfm2_vl": {"vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -3]}},
    "qwen4_exp": {"text_config": _INDEXER},
    "shieldgemma2": {"architectures": ["ShieldGemma2ForImageClassification"]},
    "xmod": {"default_language": "en_XX"},
}
"""What every published config.json of a type states, and its class has no default for."""
_HEAD = """# Families that can be pruned

Written by `python tools/families.py` from the descriptions in `families/`, `composites/` and `unsupported.json`; do not
edit. A family has the name of the `model_type` in its config.json. [README](README.md#adding-a-family) says how to add
one, or how to prune one that has no description.

*Spaces* are what recipes can prune: `heads` (attention heads or KV groups), `queries` (query heads inside KV groups),
`cross_heads` (of cross-attention), `linear_heads` (of linear attention or state spaces), `qk`, `rotary` and `values`
(dimensions inside heads), `mlp` (columns), `experts`, `shared` and `dense` (whole experts, columns of shared ones,
and of MLPs in their place), `pooling` (columns of an MLP that pools or merges tokens). *Stays whole* are
spaces that are measured and masked, and lose no unit. *Rotates* says whether recipes may rotate the residual stream.
*Also stored as* are stock types that an output may have if the family's own cannot state its shape.
"""
_TOWERS = "towers of models with text"
_COLUMNS = {"mlp", "dense", "shared"}
_TABLE = "| family | classes | spaces | stays whole | rotates | also stored as |\n|---|---|---|---|---|---|\n"


def _kind(family: Family) -> str:
    if family.modality != "text":
        return "Vision transformers"
    if family.model_type in families_with_experts():
        return "Mixtures of experts"
    return "Causal language models" if family.has_causal else "Encoders of text"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _row(family: Family) -> str:
    variants = variants_of(family.model_type)
    name = f"`{family.model_type}`" + (f" (also with {_codes(variants)})" if variants else "")
    whole_spaces = [space for space, entry in family.spaces.items() if entry.whole is not None]
    cells = [
        name,
        _codes(family.architectures),
        _codes(space for space in family.spaces if space not in whole_spaces),
        _codes(whole_spaces),
        "yes" if family.residual is not None else "no",
        _codes(family.stand_ins),
    ]
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Return the text of the page."""
    rows: dict[str, str] = {}
    for family in map(load_family, known_families()):
        kind = _kind(family)
        rows[kind] = rows.get(kind, "") + _row(family)
    text = _HEAD
    for kind in ("Causal language models", "Mixtures of experts", "Encoders of text", "Vision transformers"):
        text += f"\n## {kind}\n\n{_TABLE}{rows[kind]}"
    text += "\n## Parts of composites\n\n`--part PART` prunes one model inside another.\n\n"
    text += "| composite | parts | cannot be pruned |\n|---|---|---|\n"
    pairs = json.loads(DISCOVERED.read_text(encoding="utf-8"))["types"]["pairs"]
    for composite in map(shipped_composite, known_composites()):
        refused = "; ".join(f"`{part}`: {why}" for part, why in composite.refused.items()) or "-"
        if composite.model_type in encoder_decoders():
            why = pairs[composite.model_type]["why"]
            refused = f"{why}: `inspect` says why" if why else "-"
        text += f"| `{composite.model_type}` | {_codes(composite.parts)} | {refused} |\n"
    text += "\n## Not supported\n\n| family | why |\n|---|---|\n"
    for model_type, why in json.loads((ROOM / "unsupported.json").read_text(encoding="utf-8")).items():
        text += f"| `{model_type}` | {why} |\n"
    return text + discovered_page()


def discovered_page() -> str:
    """Return the section on types without a description."""
    found = json.loads(DISCOVERED.read_text(encoding="utf-8"))
    text = (
        "\n## Found and proven\n\nWithout a description, [discovery](discovery/README.md) finds spaces by itself. "
        "This is what it made of tiny random models of the types of transformers "
        f"{found['transformers']} (`python tools/families.py sweep`):\n*pruned* are those whose model went through "
        "`prune --recipe ridge` and `verify`; towers of models that read images with text went through "
        "`prune --recipe magnitude`, and are named behind their spaces.\n\n"
        "| kind | types | built small | spaces proven | columns | pruned | of these described above |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    known = set(known_families())
    for kind, types in found["types"].items():
        pruned = [name for name, own in types.items() if own["pruned"]]
        proven = [own["spaces"] for own in types.values() if own["spaces"]]
        columns = sum(not _COLUMNS.isdisjoint(spaces) for spaces in proven)
        built = sum(own.get("built", bool(own["spaces"])) for own in types.values())
        text += f"| {kind} | {len(types)} | {built} | {len(proven)} | {columns} | {len(pruned)} | "
        text += f"{len(known.intersection(pruned))} |\n"
    for kind, types in found["types"].items():
        text += f"\n### {kind.capitalize()}, not described\n\n| type | spaces proven | otherwise |\n|---|---|---|\n"
        for name, own in types.items():
            if name not in known:
                # Dots are escaped: these are names in other packages' code.
                why = re.sub(r"(?<=\w)\.(?=\w)", r"\.", own["why"].replace("`", "").replace("|", "/")) or "-"
                text += f"| {name} | {_codes(own['spaces']) if own['pruned'] else '-'} | {why} |\n"
    return text


# ---- sweep -------------------------------------------------------------------------------------------------------


def sweep(only: list[str]) -> None:
    """Try types, and keep what came of them."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    found: dict[str, Any] = {"types": {}}
    with suppress(OSError):
        found = json.loads(DISCOVERED.read_text(encoding="utf-8"))
    found["transformers"] = transformers.__version__
    for kind, name in [*all_types(), *all_towers()]:
        if not only or name in only:
            types = found["types"].setdefault(kind, {})
            types[name] = try_kind(kind, name)
            print(kind, name, types[name], flush=True)
            found["types"][kind] = dict(sorted(types.items()))
            DISCOVERED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def classes_by_kind() -> dict[str, dict[str, Any]]:
    """Return the kinds of models that are swept, with transformers' classes by `model_type`."""
    from transformers.models.auto import modeling_auto

    return {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "pairs": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }


def all_types() -> list[tuple[str, str]]:
    """Return the kind and `model_type` of all that is swept."""
    return [(kind, name) for kind, classes in classes_by_kind().items() for name in classes]


def all_towers() -> list[tuple[str, str]]:
    """Return the kind and `model_type` of models that read images with text, of which the towers are swept."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return [(_TOWERS, name) for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]


def try_tower(model_type: str) -> dict[str, Any]:
    """Prune the tower of a tiny random model that reads images with text, without data, and verify the output.

    Returned is what `try_type` returns.
    """
    from ckpt_prune.checkpoint.checkpoint import Checkpoint
    from ckpt_prune.common.errors import one_line
    from ckpt_prune.model.composites import extract_part

    found: dict[str, Any] = {"built": False, "spaces": [], "pruned": False}
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        try:
            source = write_tiny(model_type, None, Path(folder) / "source")
            found["built"] = True
            part = extract_part(Checkpoint.open(source), "vision").config[descriptions.OUTSIDE_KEY]
            family = descriptions.parse_family(json.dumps(part))
            spaces = [name for name, space in family.spaces.items() if space.whole is None]
            found["spaces"] = spaces
            output = str(source.parent / "output")
            options = ["--recipe", "magnitude", "--ratio", "0.5", "--container", "any"]
            if family.found is None and "heads" in spaces:  # most described towers have heads as wide as their own code
                options += ["--set", "spaces.heads.ratio=0"]
            run_command("prune", str(source), "--part", "vision", *options, "-o", output)
            run_command("verify", output, "--against", str(source))
        except (Exception, SystemExit) as error:
            text = str(error) if isinstance(error, UserError) else one_line(error)
            return found | {"why": text.replace(f"{folder}/", "").removeprefix("source: ")[:300]}
        return found | {"pruned": True, "why": family.model_type}


def try_kind(kind: str, model_type: str) -> dict[str, Any]:
    """Try a type as one of its kind: what has an encoder and a decoder is taken by both stacks only as pairs."""
    from transformers import CONFIG_MAPPING

    if kind == _TOWERS:
        return try_tower(model_type)

    named = classes_by_kind()[kind][model_type]
    architecture = named if isinstance(named, str) else named[0]
    two_stacks = kind == "pairs" and getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False)
    with patch.dict(encoder_decoders(), {model_type: architecture} if two_stacks else {}):
        known_composites.cache_clear()
        found = try_type(model_type, architecture)
    known_composites.cache_clear()
    return found


def try_type(model_type: str, architecture: str) -> dict[str, Any]:
    """Prune and verify a tiny random model of a type, by discovery even where there is a description of it.

    Returns:
        Whether it was `built`, `spaces` that are proven, whether it was `pruned`, and `why` not, or what stays whole.
    """
    from ckpt_prune.common.errors import one_line
    from ckpt_prune.model.discovery.discover import discover

    found: dict[str, Any] = {"built": False, "spaces": [], "pruned": False}
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        try:
            source = write_tiny(model_type, architecture, Path(folder) / "source")
            found["built"] = True
            config = json.loads((source / "config.json").read_text())
            if is_encoder_decoder(config):
                return found | try_stacks(source)
            if is_composite(config):
                return found | try_part(source, images="Image" in architecture)
            description = discover(config).description
            why = "; ".join(f"{space}: {reason}" for space, reason in description["found"]["whole"].items())
        except Exception as error:
            return found | {"why": one_line(error).replace(f"{folder}/", "")[:200]}
        found["spaces"] = list(description["spaces"])
        try:
            prune_and_verify(source, description)
        except (Exception, SystemExit) as error:
            text = str(error) if isinstance(error, UserError) else one_line(error)
            return found | {"why": text.removeprefix(f"{source}: ")[:200]}
        return found | {"pruned": True, "why": why}


def try_stacks(source: Path) -> dict[str, Any]:
    """Prune and verify both stacks of an encoder-decoder, or the one that can be; `spaces` of either."""
    from ckpt_prune.checkpoint.checkpoint import Checkpoint
    from ckpt_prune.model.composites import extract_part

    checkpoint, stacks, refused = Checkpoint.open(source), dict[str, Any](), None
    for part in ("encoder", "decoder"):
        try:
            stacks[part] = extract_part(checkpoint, part).config[descriptions.OUTSIDE_KEY]["spaces"]
        except UserError as error:
            refused = error
    if refused is not None and not stacks:
        raise refused
    spaces = {name: space for own in stacks.values() for name, space in own.items()}
    prune_and_verify(source, {"spaces": spaces}, part="all" if refused is None else next(iter(stacks)))
    whole = [name for name, own in stacks.items() if "heads" not in own]
    why = f"heads {f'of the {whole[0]} ' if len(whole) == 1 else ''}stay whole" if whole else ""
    why = why if refused is None else f"--part {next(iter(stacks))} alone"
    return {"spaces": list(spaces), "pruned": True, "why": why}


def try_part(source: Path, *, images: bool = False) -> dict[str, Any]:
    """Prune and verify a part of a composite; `spaces` and whether `pruned`, as in `try_type`.

    It is the text part or a decoder, or of classes of images the vision tower.
    """
    from ckpt_prune.checkpoint.checkpoint import Checkpoint
    from ckpt_prune.model.composites import extract_part

    checkpoint = Checkpoint.open(source)
    parts = load_composite(checkpoint.config).parts
    if count_stages(checkpoint.config):
        found = [extract_part(checkpoint, name).config[descriptions.OUTSIDE_KEY] for name in parts]
        prune_and_verify(source, found[0], part="all")
        return {
            "spaces": list(dict.fromkeys(space for each in found for space in each["spaces"])),
            "pruned": True,
            "why": f"{len(parts)} stages",
        }
    part = "vision" if images else "text" if "text" in parts else "decoder"
    family = descriptions.parse_family(json.dumps(extract_part(checkpoint, part).config[descriptions.OUTSIDE_KEY]))
    spaces = {name: space.model_dump() for name, space in family.spaces.items() if space.whole is None}
    prune_and_verify(source, {"spaces": spaces, "modality": family.modality}, part=part)
    return {"spaces": list(spaces), "pruned": True, "why": f"--part {part}"}


def write_tiny(model_type: str, architecture: str | None, folder: Path) -> Path:
    """Save a tiny random model of a type with a tokenizer of single characters, and an image processor.

    Args:
        architecture: its class; None for that of a model that reads images with text.
    """
    from transformers import CONFIG_MAPPING

    from ckpt_prune.model.discovery.twin import IMAGE, Sizes, build_twin, fill_in
    from ckpt_prune.model.skeleton import parse_config
    from tests.evaluation.tiny import tiny_tokenizer
    from tests.images import write_processor

    sizes = Sizes(
        hidden=64, heads=8, groups=4, head=16, mlp=48, expert_mlp=32, shared_mlp=40, experts=4, ratio=2, stage=24
    )
    config = {**CONFIG_MAPPING[model_type](**PUBLISHED.get(model_type, {})).to_dict(), "model_type": model_type}
    if architecture is None:
        config |= {"vision_config": config.get("vision_config") or {}}  # Gemma 4's is none by default
    with suppress(UserError):  # published configs state what some classes leave open
        filled = {key: fill_in(key, value, vars(sizes)) for key, value in config.items()}
        parse_config(filled)
        config = filled
    config["architectures"] = [architecture or load_composite(config).architecture]
    alone = architecture is not None and not is_composite(config)
    model: Any = build_twin(config, architecture, sizes).model if alone else build_whole(config, sizes)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return write_processor(folder, size={"height": IMAGE, "width": IMAGE})


def build_whole(config: dict[str, Any], sizes: Any) -> Any:
    """Return a small random model that is made of several, which text alone may not run."""
    from ckpt_prune.common.errors import one_line
    from ckpt_prune.model.discovery.twin import commonest_reason, make_model, make_skeleton_config, small_configs

    reasons: list[str] = []
    for small, _ in small_configs(config, sizes):
        for inner in small.values():  # a tower's output is as wide as text is
            if isinstance(inner, dict):
                inner |= {key: sizes.hidden for key in ("out_hidden_size", "text_hidden_size") if key in inner}
        try:
            return make_model(make_skeleton_config(small), load_composite(small).architecture)
        except Exception as error:  # whatever the class runs into with sizes that it does not take
            reasons.append(one_line(error))
    raise UserError(commonest_reason(reasons))


def prune_and_verify(source: Path, description: dict[str, Any], *options: str, part: str | None = None) -> None:
    """Prune a model by `ridge` with the description in its config, or a part of it, and verify the output."""
    from tests.images import write_images

    text = source.parent / "calibration.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away " * 100)
    pairs = source.parent / "pairs.jsonl"
    pairs.write_text('{"source": "the quick brown fox jumps", "target": "over the lazy dog"}\n' * 8)
    if part is None:
        config = json.loads((source / "config.json").read_text()) | {descriptions.OUTSIDE_KEY: description}
        (source / "config.json").write_text(json.dumps(config))
    options = (*options, *(() if part is None else ("--part", part)))
    if any(space.get("fixed") for space in description["spaces"].values()):
        options += ("--container", "any")  # no stock class states its width
    output = str(source.parent / "output")
    calibration = ("--data", str(pairs)) if part in ("all", "decoder") else ("--text", str(text), "--window", "16")
    if description.get("modality") == "image":
        write_images(source.parent / "images", [f"{number}.png" for number in range(8)])
        calibration = ("--images", str(source.parent / "images"))
    data = (*calibration, "--samples", "8", "--evaluate-samples", "0")
    run_command("prune", str(source), "--recipe", "ridge", "--ratio", "0.5", *data, *options, "-o", output)
    run_command("verify", output, "--against", str(source))


def run_command(*words: str) -> None:
    """Run a command; UserError with its last line if it fails."""
    from click.testing import CliRunner

    from ckpt_prune.cli.main import main

    result = CliRunner().invoke(main, words)
    if result.exit_code:
        lines = [line for line in result.output.splitlines() if "FAILED" in line or line.startswith("Error: ")]
        raise UserError((lines or [repr(result.exception)])[0].removeprefix("Error: "))


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        sweep(sys.argv[2:])
    PAGE.write_text(page(), encoding="utf-8")
