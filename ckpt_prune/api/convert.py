"""`ckpt_prune.convert`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.quantised import is_gguf
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.options.commands import ConvertOptions
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runner.resuming import resumable

if TYPE_CHECKING:
    from ckpt_prune.conversion.stock_checkpoint import Conversion

_WINDOWS = 2
"""Of a text, to compare on: enough to see that another function is computed."""


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
    from ckpt_prune.conversion.stock_checkpoint import write_stock

    say = Notices()
    compare = None
    if is_gguf(Path(options.model)):
        from ckpt_prune.gguf import require_gguf

        require_gguf()
        check_texts(options.text)
        from ckpt_prune.checkpoint.staging import refuse_overlap
        from ckpt_prune.gguf.source import comparison_with, stock_of_gguf

        refuse_overlap(Path(options.model), options.output)
        stock = stock_of_gguf(Path(options.model))
        proving = ProofOptions(text=options.text, samples=options.samples or _WINDOWS, window=options.window)
        compare = comparison_with(Path(options.model), stock, proving, say, wanted=options.proof)
    else:
        if options.text or options.samples or options.window:
            raise UserError(f"{options.model} is no GGUF file: nothing is compared on --text, --samples or --window")
        from ckpt_prune.checkpoint.checkpoint import Checkpoint
        from ckpt_prune.conversion.convert import stock_of_checkpoint

        stock = stock_of_checkpoint(Checkpoint.open(options.model))
    with resumable(options.output, say):
        return write_stock(
            stock,
            options.output,
            resume=options.resume,
            overwrite=options.overwrite,
            compare=compare,
            announce=say,
        )
