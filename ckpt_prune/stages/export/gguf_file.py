"""A GGUF file as the last step of a recipe."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ckpt_prune.common.dense_source import DenseSource
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_BITS, GGUF_FILES, GgufType
from ckpt_prune.gguf.export import ExportedGguf, export_gguf
from ckpt_prune.gguf.file_plan import check_file
from ckpt_prune.gguf.llama_cpp import require_runtime
from ckpt_prune.gguf.rounding import check_rounding
from ckpt_prune.gguf.types import bits_of, kinds_of, type_of
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.options.data import ProofOptions, words_of_windows
from ckpt_prune.stages.export.keys import Export
from ckpt_prune.stages.quantize.keys import Quantize

_FINE = 8
"""Bits from which on a weight is rounded to nearest: the importance of inputs changes nothing that matters."""


@dataclass(frozen=True)
class GgufExport:
    """The file, with all that can be checked before the first block.

    Attributes:
        recipe: what to write.
        kind: type of the matrices.
        proving: what to compare the file on.
        dense: the unpruned model, to compare with; None if it has more tokens, is a base model with an adapter, or an
            encoder-decoder of which one stack is pruned already.
        trust: run code that the checkpoint brings.
        live: samples to round by; None if weights are rounded already, or none were given.
        device: where blocks run on them.
    """

    key: ClassVar[str] = "gguf"
    noun: ClassVar[str] = "GGUF file"
    recipe: Export
    kind: GgufType
    proving: ProofOptions
    dense: DenseSource | None
    trust: bool
    live: LiveSamples | None
    device: torch.device

    @classmethod
    def of(cls, recipe: Export, job: Job) -> "GgufExport":
        """Return the file of an output that is still to be made.

        Raises:
            UserError: llama.cpp has no such model or tokenizer, or is not installed.
        """
        if recipe.proof:
            require_runtime()
        source, rounding = job.model, job.recipe.get(Quantize)
        rounded = rounding is not None and rounding.format == "int4"
        kind = recipe.gguf_type or ("q4_0" if rounded else type_of(source.checkpoint.dtype))
        layout, dense = check_file(source, trust=job.trust), None
        live = None if rounding is not None or layout.architecture.stacked else job.live
        if recipe.rounding == "gptq" and layout.architecture.stacked:
            raise UserError("export.rounding: gptq rounds models with one stack of blocks: leave it out")
        if recipe.rounding == "gptq" and live is None:
            raise UserError("export.rounding: gptq rounds by what reaches each matrix: give --text")
        kinds = kinds_of(layout, kind, recipe.other_types, weighted=live is not None)[0].values()
        if recipe.rounding == "nearest" and not any(bits_of(each) < _FINE for each in kinds):
            live = None
        check_rounding(kinds, weighted=live is not None)
        # Between its two stacks an encoder-decoder has two widths, and no class loads it.
        if not (source.checkpoint.rewritten or source.checkpoint.adapter or layout.architecture.stacked):
            dense = DenseSource(source.checkpoint.name, source.checkpoint.path)
        proving = ProofOptions(text=job.proving.text, data=job.proving.data, window=job.proving.window)
        return cls(recipe, kind, proving, dense, job.trust, live, job.device)

    @property
    def file(self) -> str:
        """The name that the file has in an output."""
        return GGUF_FILES[self.recipe.other_types.name_file(self.kind)]

    def bytes(self, parameters: int) -> int:
        others = self.recipe.other_types
        named = [self.kind, others.embedding, others.output, *others.matrices.values()]
        return int(parameters * max(GGUF_BITS.get(each, 8) for each in named if each is not None) // 8)

    def is_done(self, output: Path) -> bool:
        return (output / self.file).is_file()

    def run(self, output: Path) -> ExportedGguf:
        """Write the file of an output beside its weights."""
        return export_gguf(
            str(output),
            output / self.file,
            self.proving,
            kind=self.kind,
            others=self.recipe.other_types,
            proof=self.recipe.proof,
            dense=self.dense,
            live=self.live,
            feedback=self.recipe.rounding == "gptq",
            device=self.device,
            overwrite=True,
            trust=self.trust,
        )

    def command(self, output: Path) -> str:
        file, types = str(output / self.file), self.recipe.other_types.options
        if self.recipe.rounding == "nearest" or self.live is None:
            words = ["export", str(output), "--format", "gguf", "--dtype", self.kind, "-o", file, *types]
            return shlex.join(["ckpt-prune", *words])
        samples = self.live.samples
        data = words_of_windows(self.proving.text, len(samples), samples.tokens, self.live.seed)
        words = ["quantize", str(output), "--format", "gguf", "--type", self.kind, *types, *data, "-o", file]
        return shlex.join(["ckpt-prune", *words])
