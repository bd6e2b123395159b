"""Keys of a family's description that hold several values (model/README.md says what each means)."""

from functools import reduce
from math import inf, nextafter
from typing import Any, Literal

from pydantic import Field

from ckpt_prune.model.purposes import Purpose
from ckpt_prune.model.spaces import Dimension, Incidence, StrictModel


class Multiple(StrictModel):
    """A dimension that a config states as a multiple of the hidden size: an integer, or any number (`fraction`).

    If `listed`, the key has one for each stage of blocks.
    """

    key: str
    gated: bool = False
    fraction: bool = False
    listed: bool = False

    def width(self, hidden: int, ratio: float) -> int:
        """Return the dimension; of a gated MLP, two thirds of the multiple, rounded up to a multiple of eight."""
        width = int(hidden * ratio)
        return (int(width * 2 / 3) + 7) // 8 * 8 if self.gated else width

    def values(self, config: Any, stage: int | None, ratio: float) -> dict[str, Any]:
        """Return the config key with a multiple, of this stage if there is one for each."""
        if not self.listed or stage is None:
            return {self.key: ratio}
        ratios = list(getattr(config, self.key))
        return {self.key: [*ratios[:stage], ratio, *ratios[stage + 1 :]]}

    def ratio(self, hidden: int, width: int) -> float:
        """Return by which multiple a config states a width: of a fraction, a class rounds the product down to it."""
        if not self.fraction:
            return width // hidden
        ratio = width / hidden
        return ratio if int(hidden * ratio) == width else nextafter(ratio, inf)


class Attention(StrictModel):
    """The linear modules of a block's attention; some may be one and the same.

    If keys and values of all heads are made of one vector of a token, `latent` is the linear module that makes it, and
    what it makes is cached in their place. The widths of the others need not be those of heads then.
    """

    query: str
    key: str
    value: str
    output: str
    values: Incidence | None = None
    latent: str | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """All of them, once each."""
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.output)))


GATE, UP, DOWN = "gate", "up", "down"
"""Roles of the linear modules of an expert."""
SHIFT = "shift"
"""The bias of an expert's last linear module, which the router weighs: no compensation adds to it."""
GROUPED = 8
"""Columns of experts are a multiple of this, because torch's product of all experts needs rows of 16 bytes."""


class Experts(StrictModel):
    """The experts of a block's mlp, of which a router chooses some for every token."""

    count: str
    router: str
    gate: str
    up: str
    down: str
    module: str
    stacked: bool = False
    no_suffix: bool = False
    transposed: bool = False
    biased: bool = False
    chosen: str
    groups: tuple[str, str] | tuple[()] = ()

    def grouping(self, config: Any) -> tuple[int, int]:
        """Return the router's number of groups of experts, and to how many of them it sends a token; (1, 1) if none."""
        if not self.groups:
            return 1, 1
        count, sent = (int(getattr(config, key) or 1) for key in self.groups)
        return count, sent

    @property
    def roles(self) -> dict[str, str]:
        """Linear module of an expert → its role; a module that holds gate and up is the gate."""
        return {self.up: UP, self.gate: GATE, self.down: DOWN}

    def list_rewritten(self, method: str) -> set[str]:
        """Return the linear modules of a kept expert that a compensation of whole experts changes."""
        return set() if method == "none" else {self.down}

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """Tensor of a block that files hold for all experts → that of one; empty if files hold them apart."""
        if not self.stacked:
            return {}
        names = {module.replace(".{expert}", ""): module for module in self.roles}
        kind = "" if self.no_suffix else ".weight"
        stacks: dict[str, tuple[str, ...]] = {f"{name}{kind}": (f"{path}.weight",) for name, path in names.items()}
        kinds = {module: SHIFT if module == self.down else "bias" for module in self.roles}
        return stacks | {f"{name}_bias": (f"{path}.{kinds[path]}",) for name, path in names.items() if self.biased}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Tensors that linear modules of an expert may have."""
        return ("weight", "bias", SHIFT) if self.biased else ("weight",)

    @property
    def held(self) -> dict[str, tuple[str, ...]]:
        """Tensor of a block that a model in memory has for all experts → those of one, in order of their rows."""
        if self.no_suffix:
            return {}  # the same as in files
        gates = tuple(f"{module}.weight" for module in dict.fromkeys((self.gate, self.up)))
        return {f"{self.module}.gate_up_proj": gates, f"{self.module}.down_proj": (f"{self.down}.weight",)}


class Refusal(StrictModel):
    """A setting of the config with which a model cannot be read, or its residual stream cannot be rotated."""

    key: str
    value: bool | int | None = None
    unlike: str | int | None = None
    kind: str | None = None
    purpose: Purpose | None = None
    default: bool | None = None
    why: str

    def holds(self, config: Any, dimension: Dimension) -> bool:
        try:
            value = self.config_value(config)
        except AttributeError:
            return False
        if self.unlike is not None:
            return bool(value != (dimension(self.unlike) if isinstance(self.unlike, str) else self.unlike))
        return bool(value) is self.value if isinstance(self.value, bool) else bool(value == self.value)

    def config_value(self, config: Any) -> Any:
        """Return the config's value of the key; AttributeError if neither config nor `default` has one."""
        try:
            return reduce(getattr, self.key.split("."), config)
        except AttributeError:
            if self.default is None:
                raise
            return self.default


class ResidualKeys(StrictModel):
    """How a model reads from and adds to its residual stream, if rotations can be absorbed by what does."""

    norm: Literal["rms", "layer"]
    reads: dict[str, list[str]]
    writes: list[str]
    starts: list[str] = Field(default_factory=list)
    projections: list[str] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    final: str
    parallel: bool | str = False
    refused: list[Refusal] = Field(default_factory=list)


class FamilyClass(StrictModel):
    """One class of a family: the base model and a head on it, or the base model alone."""

    auto: str
    head: str | None = None
    pooled: list[str] = Field(default_factory=list)
    binary: bool = False
    probe: str | None = None


class SpaceProof(StrictModel):
    """The outcome of the proofs of a space on a small random model.

    Attributes:
        together: its units in another order, in all of its tensors, change no output.
        alone: in any one of its tensors alone they do.
        fewer: the class with fewer units computes what it computes with those zero; None for whole experts.
    """

    together: bool
    alone: bool
    fewer: bool | None

    @property
    def holds(self) -> bool:
        return self.together and self.alone and self.fewer is not False


class Found(StrictModel):
    """How a description was found (`model.discovery`).

    Attributes:
        proofs: of each space.
        whole: what stays whole → why.
        transformers: version of the library whose class was read.
        config: a small one, of a class that cannot be built from its own defaults.
    """

    proofs: dict[str, SpaceProof]
    whole: dict[str, str]
    transformers: str
    config: dict[str, Any] | None = None
