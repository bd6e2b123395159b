"""The size of a GGUF file before any weight is read, of a model as it is or as it would be pruned: for budgets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind
from gguf.gguf_writer import WriterState

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.evaluation.whole_model import config_of
from ckpt_prune.gguf.contents import Layout
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.tokenizer import FileTokenizer, read_tokenizer
from ckpt_prune.gguf.types import NO_OTHERS, kinds_of, tensor_bytes
from ckpt_prune.gguf.writing import fill_writer, write_head
from ckpt_prune.job.layout import Output
from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class FilePlan:
    """The types and sizes that a GGUF file would have.

    Attributes:
        architecture: of llama.cpp.
        kinds: type of every tensor, by its name in the file.
        tensor_bytes: of every tensor, without what aligns it.
        bytes: of the whole file.
        notes: what differs from what was asked for, a line each.
    """

    architecture: str
    kinds: Mapping[str, Kind]
    tensor_bytes: Mapping[str, int]
    bytes: int
    notes: tuple[str, ...]


class FilePlanner:
    """Plans files of a model and of what it is pruned to; reads its tokenizer once, from another folder if given one.

    `FilePlanner(open_model("MODEL")).plan("q4_k_m", OtherTypes(matrices={"ffn_down": "q6_k"})).bytes` is a size.
    """

    def __init__(self, model: Model, tokenizer: Path | None = None) -> None:
        self.model, self._folder = model, tokenizer or model.checkpoint.whole

    def plan(
        self,
        chosen: GgufType,
        others: OtherTypes = NO_OTHERS,
        *,
        output: Output | None = None,
        weighted: bool = False,
        fitted: bool = False,
    ) -> FilePlan:
        """Return what the file of a model would be, to the byte.

        Before an output is written, about a hundred bytes are not known: its name, and the task that its card states.

        Args:
            chosen: type of the file.
            others: types of single matrices.
            output: container and shapes of the model as it would be pruned (`stages.shared.output.output_at`, or
                `Output(choose_container(…), plan_layout(…), …)`), with the same vocabulary; None: as it is.
            weighted: the importance of inputs will be known.
            fitted: matrices will be rounded by what reaches them.

        Raises:
            UserError: llama.cpp computes no such model, or the types do not go with it.
        """
        layout = lay_out(self.model if output is None else model_of_output(self.model, output), chosen)
        kinds, changed = kinds_of(layout, chosen, others, weighted=weighted)
        head = self._head_bytes(layout, chosen, kinds, self._bare_tokenizer, fitted=fitted) + self._tokenizer_bytes
        # The tokenizer's share is the difference of two whole heads, so that their alignment is done here.
        sizes = tensor_bytes(layout, kinds)
        size = aligned(head) + sum(map(aligned, sizes.values()))
        return FilePlan(layout.architecture.name, kinds, sizes, size, (*layout.notes, *changed))

    def write_zeros(self, path: Path, layout: Layout, chosen: GgufType, kinds: Mapping[str, Kind]) -> None:
        """Write a file of a layout whose weights are all 0, to be timed; zeros take no disk where files have holes.

        Args:
            path: of the file, whatever is there.
            layout: of the model, or of one with fewer columns.
            chosen: type that the file says it has.
            kinds: type of every tensor.
        """
        writer = fill_writer(path, layout, chosen, kinds, self._tokenizer, self.model.checkpoint.whole)
        with disk_failures(path):
            write_head(writer)
            writer.close()
            of_tensors = sum(map(aligned, tensor_bytes(layout, kinds).values()))
            os.truncate(path, aligned(path.stat().st_size) + of_tensors)

    def _head_bytes(
        self,
        layout: Layout,
        chosen: GgufType,
        kinds: Mapping[str, Kind],
        tokenizer: FileTokenizer,
        *,
        fitted: bool = False,
    ) -> int:
        writer = fill_writer(None, layout, chosen, kinds, tokenizer, self.model.checkpoint.whole, fitted=fitted)
        place = BytesIO()
        writer.fout, writer.state = [place], WriterState.EMPTY  # type: ignore[list-item]
        write_head(writer)
        return place.tell()

    @cached_property
    def _tokenizer(self) -> FileTokenizer:
        layout = lay_out(self.model)
        return read_tokenizer(self._folder, layout.values["vocab_size"], encodes=layout.embeds)

    @property
    def _bare_tokenizer(self) -> FileTokenizer:
        """The tokenizer without what takes long to count."""
        return replace(self._tokenizer, values={})

    @cached_property
    def _tokenizer_bytes(self) -> int:
        layout = lay_out(self.model)
        kinds, _ = kinds_of(layout, "f32")
        full, bare = (self._head_bytes(layout, "f32", kinds, each) for each in (self._tokenizer, self._bare_tokenizer))
        return full - bare


def check_file(model: Model, *, trust: bool = False) -> Layout:
    """Return the layout of the file of a model, after its tokenizer was read as the file would have it.

    That of fewer tokens is in llama.cpp if that of all is. Beside an adapter it is in no one folder, and not read.

    Args:
        trust: run the model's own code to read its config.

    Raises:
        UserError: llama.cpp has no such model or tokenizer.
    """
    layout, checkpoint = lay_out(model), model.checkpoint
    rows = layout.values["vocab_size"]
    if checkpoint.rewritten:
        rows = config_of(checkpoint.path, trust=trust).get_text_config().vocab_size
    if checkpoint.adapter is None:
        read_tokenizer(checkpoint.whole, rows, encodes=layout.embeds)
    return layout


def aligned(size: int) -> int:
    """Return the bytes that a tensor, or the head, takes in a file with what follows it up to the next one."""
    return int(gguf.GGUFWriter.ggml_pad(size, gguf.GGUF_DEFAULT_ALIGNMENT))


def model_of_output(model: Model, output: Output) -> Model:
    """Return the model that an output would hold, whose weights are nowhere: for names, shapes and config alone."""
    stored = model.checkpoint.tensors
    some = next(iter(stored.values()))
    tensors = {
        name: replace(stored.get(name, some), name=name, dtype=dtype, shape=shape, scaled=None, adapter=None)
        for specs in output.layout.values()
        for name, (dtype, shape) in specs.items()
    }
    return Model.of(replace(model.checkpoint, config=output.container.config, tensors=tensors))
