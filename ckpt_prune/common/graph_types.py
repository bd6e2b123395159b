"""Number formats of exported graphs."""

from typing import Literal

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"]
"""Types of the matrices of a GGUF file."""
GraphType = Literal["fp32", "fp16", "int8", "int4", "q4f16"]
"""32 or 16 bits; 8 or 4 bits computed in float32; 4 bits computed in float16."""
ROUNDED_TYPES: tuple[GraphType, ...] = ("int8", "int4", "q4f16")
"""Types with rounded weights: validated by the task's metric instead of by a tolerance on outputs."""
