"""`ckpt_prune.convert`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.common.progress import Notices
from ckpt_prune.options.commands import ConvertOptions
from ckpt_prune.runner.resuming import resumable

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

    Or MODEL is a GGUF file of a model that generates text. The output has its tokenizer and chat template. Rounded
    weights become float16. An interrupted run leaves OUT.partial, which --resume continues.
    """
    from ckpt_prune.conversion.stock_checkpoint import write_stock

    if options.model.endswith(".gguf") and Path(options.model).is_file():
        from ckpt_prune.gguf import require_gguf

        require_gguf()
        from ckpt_prune.checkpoint.staging import refuse_overlap
        from ckpt_prune.gguf.source import stock_of_gguf

        refuse_overlap(Path(options.model), options.output)
        stock = stock_of_gguf(Path(options.model))
    else:
        from ckpt_prune.checkpoint.checkpoint import Checkpoint
        from ckpt_prune.conversion.convert import stock_of_checkpoint

        stock = stock_of_checkpoint(Checkpoint.open(options.model))
    say = Notices()
    with resumable(options.output, say):
        return write_stock(stock, options.output, resume=options.resume, overwrite=options.overwrite, announce=say)
