"""What an exported folder says of how a graph was rounded."""

from typing import Literal

from pydantic import BaseModel


class Kept(BaseModel):
    """A weight that is stored in more bits than most, since it costs too much in few."""

    name: str
    harm: float
    """What the outputs lose where it alone is in few bits; of weights that were measured at once its share by bytes."""
    at_once: int = 1
    """How many weights were measured at once, itself included."""


class Quantised(BaseModel):
    """How a graph was rounded."""

    scheme: Literal["blocks", "dynamic", "static"]
    """Weights in blocks; or weights and inputs in int8, ranges of inputs taken at each call or once for all."""
    bits: Literal[4, 8]
    block_size: int
    symmetric: bool
    accuracy_level: int
    rounding: Literal["nearest", "gptq"]
    weights: dict[str, int]
    """How weights are stored → how many are: `4-bit blocks`, `8-bit blocks`, `int8`."""
    padded: int
    """Weights whose last blocks are padded with zeros, since the block size does not divide their inputs."""
    kept: list[Kept]
    """The most harmful by the byte first."""
    loss: float | None
    """What the outputs lose where all is rounded as it is, on what weights were picked by. None where it was not
    measured."""
    allowed: float
    """What they might."""
    unit: Literal["KL", "energy"] = "KL"
    """What both are in: nats of each prediction, or a share of the features' energy."""
    measured_on: str
    """What harm, Grams and ranges were measured on."""
