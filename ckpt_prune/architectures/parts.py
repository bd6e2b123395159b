"""Parts of a family's description."""

from typing import Any, Literal

from pydantic import Field

from ckpt_prune.architectures.spaces import Description, Dimension


class Multiple(Description):
    """A dimension that a config says as an integer multiple of the hidden size.

    Attributes:
        key: config key of the multiple.
        gated: two thirds of the multiple, rounded up to a multiple of eight.
    """

    key: str
    gated: bool = False

    def width(self, hidden: int, ratio: int) -> int:
        """The dimension under a multiple."""
        width = int(hidden * ratio)
        return (int(width * 2 / 3) + 7) // 8 * 8 if self.gated else width


class Attention(Description):
    """The linear modules of a block's attention; some may be one and the same."""

    query: str
    key: str
    value: str
    output: str

    @property
    def modules(self) -> tuple[str, ...]:
        """All of them, once each."""
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.output)))


class Refusal(Description):
    """A setting of the config under which a model cannot be read, or its residual stream cannot be rotated.

    Attributes:
        key: of the config; a config without it does not have the setting.
        value: what it is then; or, where `unlike` is given, nothing.
        unlike: a dimension that the key's value then differs from.
        kind: the one kind of rotation that it rules out, or None for all that turn the stream.
        why: in words, after "KEY:" or "cannot be rotated:".
    """

    key: str
    value: bool | None = None
    unlike: str | None = None
    kind: str | None = None
    why: str

    def holds(self, config: Any, dimension: Dimension) -> bool:
        """Whether a config has the setting."""
        if not hasattr(config, self.key):
            return False
        found = getattr(config, self.key)
        return bool(found != dimension(self.unlike)) if self.unlike is not None else bool(found) is self.value


class Residual(Description):
    """How a model reads from and adds to its residual stream, where rotations can be absorbed by what does.

    Attributes:
        norm: what stands before each read: an RMSNorm (rms) or a LayerNorm (layer).
        reads: norm of a block → linear modules it feeds.
        writes: linear modules whose output is added to the stream.
        starts: modules whose tables make up the stream before the first block.
        final: the norm before the head.
        refused: settings under which none of this holds.
    """

    norm: Literal["rms", "layer"]
    reads: dict[str, list[str]]
    writes: list[str]
    starts: list[str]
    final: str
    refused: list[Refusal] = Field(default_factory=list)


class Architecture(Description):
    """One class of a family: the base model and a head on it, or the base model alone.

    Attributes:
        auto: the transformers Auto class that users load it with.
        head: module path of the linear that a tied embedding stands in for, or None.
        pooled: modules that see one token of a sequence only.
    """

    auto: str
    head: str | None = None
    pooled: list[str] = Field(default_factory=list)
