"""What graphs are stored in."""

from typing import Literal

GraphType = Literal["fp32", "fp16", "int8", "int4", "q4f16"]
"""32 or 16 bits, 8 or 4 bits computed in float32, 4 bits computed in float16."""
QUANTISED: tuple[GraphType, ...] = ("int8", "int4", "q4f16")
"""Those whose weights are rounded: not outputs are held to a tolerance, but the task's metric to an allowance."""
