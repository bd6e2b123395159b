"""`ckpt_prune.convert`."""

from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.options.commands import ConvertOptions

if TYPE_CHECKING:
    from ckpt_prune.conversion.stock_checkpoint import Conversion


@takes(ConvertOptions)
def convert(options: ConvertOptions) -> "Conversion":
    """Write MODEL as the stock class of transformers that computes the same, so that it can be pruned.

    MODEL is timm's plain vit, deit or deit3, as timm published it or in transformers' timm_wrapper, or a masked
    autoencoder (vit_mae), of which the encoder is kept. The output is a vit, or a deit if there is a distillation
    token. Layer scales are absorbed by the projections before them. A model that computes anything else is refused with
    the reason.

    Or MODEL is a folder with a LoRA adapter of peft's. The output is its base model with the adapter merged.

    Or MODEL is a GGUF file of a model that generates text. The output has its tokenizer and chat templates. Rounded
    weights become float16. If llama.cpp is installed, it runs the file on a text and PyTorch the output: tokens, KL
    divergence, top-1 and perplexity. If they compute something else, nothing is kept, and the exit code is 1.

    An interrupted run leaves OUT.partial, which --resume continues.
    """
    from ckpt_prune.runner.convert import convert_model

    return convert_model(options)
