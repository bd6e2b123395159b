"""Options that say how a model is opened, and where the work is done."""

from typing import Literal

from ckpt_prune.options.option import MACHINE, MODEL, Input, Model, Options, Strings, option

PartName = Literal["text", "vision", "encoder", "decoder", "backbone", "stage1", "stage2", "stage3", "stage4", "stage5"]
"""Parts of a composite model that commands can name."""
Provider = Literal["cpu", "cuda"]


class TrustOptions(Options):
    """Whose code may run."""

    group = MACHINE
    trust_remote_code: bool = option(default=False, digest="none")
    """Accept a model whose config.json or image processor asks for code of its own. Only evaluate, export, validate and
    benchmark run the model's code; every other command uses the stock class of its model_type if each tensor fits it.
    An image processor's code runs if transformers has no such class. A tokenizer's code never runs, and code is never
    downloaded from the Hub."""


class OpeningOptions(TrustOptions):
    """How a model is opened that is measured or pruned."""

    group = MODEL
    family: Input = option(default=None, metavar="FILE", digest="content")
    """JSON file that describes the model's family, in place of what is found on a small model of its class. Start from
    the `description` that `ckpt-prune inspect MODEL --json` prints. Outputs carry it along."""
    part: Literal[PartName, "all"] | None = option(default=None)
    """Part of a model that is made of several (qwen2_5_vl, gemma3, llava, bart, ...). Only this part is measured and
    pruned; every other tensor keeps its bytes. `prune` also takes all: the vision tower, on the images of --images or
    --data, and then the text part behind it, on --data or --text; of an encoder-decoder, where it is the default, the
    encoder and then the decoder; of a model of images in stages (swin), where it is the default too, each stage."""


class DeviceOptions(Options):
    """The device that does the work."""

    group = MACHINE
    device: str = option(default="auto", metavar="auto|cpu|cuda[:N]", digest="content")
    """The device that does the work."""


class ProviderOptions(Options):
    """The device that onnxruntime runs on."""

    group = MACHINE
    provider: Provider | None = option(default=None)
    """Device that onnxruntime runs on. If CUDA cannot be loaded, a notice says so and the CPU is used. [default: the
    device that the graph is fused for, else cpu]"""


class SpreadOptions(Options):
    """How a whole model is spread over devices."""

    group = MACHINE
    device_map: Literal["auto"] | None = option(default=None)
    """auto: spread a whole model over GPUs, memory and disk, with accelerate (needs the extra devices). [default: one
    device]"""
    max_memory: Strings = option(default=(), metavar="DEVICE=SIZE")
    """Most memory that a device gives to it: cpu=24GB, or 0=70GB for the first GPU. May be repeated. [default: what
    is free]"""


class StateMemoryOptions(Options):
    """Memory for hidden states."""

    group = MACHINE
    state_memory: float = option(default=8.0, ge=0, le=2**20, metavar="GB", digest="none")
    """GB of hidden states to keep in memory. More of them go to memory-mapped files; no result changes. They take
    samples x tokens x hidden size x 4 bytes (2 in bfloat16), twice if two models are run."""


class SourceOptions(DeviceOptions, OpeningOptions):
    """Which model to read, and where to work."""

    model: Model = option(kw_only=False, group=MODEL, digest="content")
    """Folder of a model, or a Hub id."""
