"""Parts of a family's description."""

from functools import reduce
from typing import Any, Literal

from pydantic import Field

from ckpt_prune.model.purposes import Purpose
from ckpt_prune.model.spaces import Dimension, Incidence, Pairing, StrictModel


class Multiple(StrictModel):
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


class Attention(StrictModel):
    """The linear modules of a block's attention; some may be one and the same.

    Attributes:
        query: its path in a block.
        key: its path.
        value: its path.
        output: its path.
        values: where on `value` the values of KV heads lie, one unit each, where it makes something else too.
        latent: whether key and value are the projection of what is cached of a token in place of both, and query any
            that reads the same.
    """

    query: str
    key: str
    value: str
    output: str
    values: Incidence | None = None
    latent: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """All of them, once each."""
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.output)))


class Rotary(StrictModel):
    """How a family turns whole queries and keys by position, pair by pair.

    Attributes:
        pairs: how the two dimensions of a pair lie in a head.
        tables: how cosines and sines lie in what a block is passed.
    """

    pairs: Pairing
    tables: Pairing


GATE, UP, DOWN = "gate", "up", "down"
"""What the linear modules of an expert do."""
GROUPED = 8
"""Columns of experts are a multiple of this where torch multiplies all experts at once: it wants rows of 16 bytes."""


class Experts(StrictModel):
    """The experts of a block's mlp, of which a router chooses some for every token.

    Modules have `{expert}` in their paths, whatever files hold.

    Attributes:
        count: the dimension that counts them.
        router: the linear module whose rows are the experts' logits; its bias is of the choice alone.
        gate: the linear module whose output passes the activation, of one expert.
        up: what that is multiplied by. Where it is the gate, one weight holds both, the gate's rows first.
        down: what makes the expert's output.
        module: what stands in a block of the model for all experts together.
        stacked: whether files hold each linear module of all experts in one tensor, named without `{expert}`.
        chosen: config key of how many experts see a token.
        groups: config keys of how many groups of neighbouring experts there are, and of how many of them a token is
            sent to; empty if the router knows no groups.
        raters: how many of a group's best experts rate it.
        ungrouped: config key and its value with which the router passes over the groups; empty if there is none.
    """

    count: str
    router: str
    gate: str
    up: str
    down: str
    module: str
    stacked: bool = False
    chosen: str
    groups: tuple[str, str] | tuple[()] = ()
    raters: int = 2
    ungrouped: tuple[str, str] | tuple[()] = ()

    def grouping(self, config: Any) -> tuple[int, int]:
        """How many groups the router divides the experts into, and to how many of them it sends a token.

        Args:
            config: of the model.

        Returns:
            (1, 1) if the router looks at no groups.
        """
        if not self.groups or (self.ungrouped and getattr(config, self.ungrouped[0], None) == self.ungrouped[1]):
            return 1, 1
        count, sent = (int(getattr(config, key) or 1) for key in self.groups)
        return count, sent

    @property
    def roles(self) -> dict[str, str]:
        """Linear module of an expert → what it does; one that holds gate and up is the gate."""
        return {self.up: UP, self.gate: GATE, self.down: DOWN}

    def rewritten(self, method: str) -> set[str]:
        """Linear modules of an expert that stays which a compensation of whole experts changes."""
        return set() if method == "none" else {self.down}

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """Tensor of a block that files hold for all experts → the module of one; where they do."""
        return {f"{m.replace('.{expert}', '')}.weight": (m,) for m in self.roles} if self.stacked else {}

    @property
    def held(self) -> dict[str, tuple[str, ...]]:
        """Tensor of a block that a model in memory has for all experts → the modules of one, in order of their rows."""
        gates = tuple(dict.fromkeys((self.gate, self.up)))
        return {f"{self.module}.gate_up_proj": gates, f"{self.module}.down_proj": (self.down,)}


class Refusal(StrictModel):
    """A setting of the config under which a model cannot be read, or its residual stream cannot be rotated.

    Attributes:
        key: of the config, with dots between keys of configs inside it; a config without it does not have the setting.
        default: what a config without the key has, where its class does not fill it in.
        value: what it is then: a number, or whether it is anything; or, where `unlike` is given, nothing.
        unlike: a dimension that the key's value then differs from, or a number.
        kind: the one kind of rotation that it rules out, or None for all that turn the stream (values do not).
        purpose: the one purpose that it rules out, or None for a model of any.
        why: in words, after "KEY:" or "cannot be rotated:".
    """

    key: str
    value: bool | int | None = None
    unlike: str | int | None = None
    kind: str | None = None
    purpose: Purpose | None = None
    default: bool | None = None
    why: str

    def holds(self, config: Any, dimension: Dimension) -> bool:
        """Whether a config has the setting."""
        try:
            found = self.found(config)
        except AttributeError:
            return False
        if self.unlike is not None:
            return bool(found != (dimension(self.unlike) if isinstance(self.unlike, str) else self.unlike))
        return bool(found) is self.value if isinstance(self.value, bool) else bool(found == self.value)

    def found(self, config: Any) -> Any:
        """What a config has under the key.

        Raises:
            AttributeError: nothing.
        """
        try:
            return reduce(getattr, self.key.split("."), config)
        except AttributeError:
            if self.default is None:
                raise
            return self.default


class Residual(StrictModel):
    """How a model reads from and adds to its residual stream, where rotations can be absorbed by what does.

    Attributes:
        norm: what stands before each read: an RMSNorm (rms) or a LayerNorm (layer).
        reads: norm of a block → linear modules it feeds.
        writes: linear modules whose output is added to the stream.
        starts: modules whose tables make up the stream before the first block.
        projections: modules of any kind whose output does, its channels first in their weights.
        tokens: tensors that do, the stream's dimensions last; those that a checkpoint has. What begins in these or in
            projections can lie in one basis of fewer dimensions; rotations are not absorbed there.
        final: the norm before the head.
        beside: whether attention and mlp read the same stream although a norm of its own feeds each, or the config key
            that says so. Those that one norm feeds do.
        refused: settings under which none of this holds.
    """

    norm: Literal["rms", "layer"]
    reads: dict[str, list[str]]
    writes: list[str]
    starts: list[str] = Field(default_factory=list)
    projections: list[str] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    final: str
    beside: bool | str = False
    refused: list[Refusal] = Field(default_factory=list)


class Architecture(StrictModel):
    """One class of a family: the base model and a head on it, or the base model alone.

    Attributes:
        auto: the transformers Auto class that users load it with.
        head: the linear that a tied embedding stands in for, as it stands on disk, or None.
        pooled: modules that see one token of a sequence only.
        binary: whether its logits say of every token how likely one of two classes is, without an axis of classes
            (ELECTRA's discriminator).
        probe: torch's attention by which one query of the model's own pools all tokens, or None.
    """

    auto: str
    head: str | None = None
    pooled: list[str] = Field(default_factory=list)
    binary: bool = False
    probe: str | None = None
