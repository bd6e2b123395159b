"""The cost of a model as files state it. Loads no torch."""

from typing import Annotated

from pydantic import ConfigDict, Field

from ckpt_prune.common.records import Count, FixedRecord


class Cost(FixedRecord):
    """Size of one model.

    Attributes:
        parameters: a tied head counted once, stored buffers not at all.
        bytes: of its tensors on disk.
        flops: of one forward pass over one sample of `tokens` tokens, without a cache: two per multiply-add of every
            matrix product and convolution, attention scores unmasked, as `torch.utils.flop_counter` counts.
        tokens: of a text, the context length, at most 2048; of an image, its patches and special tokens; None of a
            model of images in stages, each of which has another number.
        cache: bytes that one token takes in the cache of keys and values, in the checkpoint's type; None if it
            generates no text.
    """

    optional = frozenset({"cache"})

    model_config = ConfigDict(frozen=True)

    parameters: Annotated[int, Field(ge=1, le=2**63)]
    bytes: Annotated[int, Field(ge=1, le=2**63)]
    flops: Annotated[int, Field(ge=1, le=2**100)]
    tokens: Count | None = None
    cache: Count | None = None


class WholeSize(Cost):
    """Size of a model of which parts are pruned one by one.

    As `Cost`, but `flops` is None if samples are of two kinds.
    """

    optional = frozenset({"flops", "tokens", "cache"})

    flops: Annotated[int, Field(ge=1, le=2**100)] | None = None  # type: ignore[assignment]


class WholeSizes(FixedRecord):
    """Sizes of the dense model and of an output several of whose parts are pruned."""

    before: WholeSize
    after: WholeSize
