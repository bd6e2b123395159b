"""Number formats of exported graphs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

PlainGgufType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
OneOrTwoBits = Literal["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "q2_k_s", "q2_k"]
ThreeBits = Literal["iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "q3_k_s", "q3_k_m", "q3_k_l"]
FourToSixBits = Literal["iq4_xs", "iq4_nl", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"]
MixedGgufType = Literal[OneOrTwoBits, ThreeBits, FourToSixBits]
GgufType = Literal[PlainGgufType, MixedGgufType]
"""Types of the matrices of a GGUF file. The mixtures have more bits in some matrices than in others."""
GGUF_TYPES_IN_WORDS = (
    f"{', '.join(get_args(PlainGgufType))}, or a mixture that llama.cpp rounds, such as q4_k_m: those listed from "
    f"{get_args(MixedGgufType)[0]} to {get_args(MixedGgufType)[-1]}"
)
GGUF_ROWS = dict.fromkeys(get_args(MixedGgufType), 256) | dict.fromkeys(
    ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "iq4_nl"), 32
)
"""GGUF type → what rows are a multiple of, so that no matrix gets another type."""
GGUF_FILES: dict[str, str] = {kind: f"model-{kind}.gguf" for own in get_args(GgufType) for kind in (own, f"{own}-mix")}
"""GGUF type, or one with types of single matrices beside it → name of the file that a recipe ends in, in its output."""
GGUF_BITS = dict.fromkeys(get_args(GgufType), 8) | {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 9, "q6_k": 9, "mxfp4": 9}
"""GGUF type → bits of a weight at most, with what embeddings and rows that do not divide take."""
PlainTensorType = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"]
CoarseTensorType = Literal["mxfp4", "iq4_nl", "iq4_xs", "q3_k", "iq3_s", "iq3_xxs", "q2_k"]
LeastTensorType = Literal["iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s"]
TensorType = Literal[PlainTensorType, CoarseTensorType, LeastTensorType]
"""Types that a single matrix of a GGUF file can have."""


@dataclass(frozen=True)
class OtherTypes:
    """Types of matrices of a GGUF file that differ from what the type of the file says.

    Attributes:
        embedding: of the embedding, and of the head if it has one of its own.
        output: of the head, if it has one of its own.
        matrices: expression that is looked for in names of matrices, such as "ffn_down" → type. The first that
            matches counts.
    """

    embedding: TensorType | None = None
    output: TensorType | None = None
    matrices: Mapping[str, TensorType] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        """The options of `export` and `quantize` that say so."""
        words = ["--embedding-type", self.embedding] if self.embedding else []
        words += ["--output-type", self.output] if self.output else []
        return words + [word for pair in self.matrices.items() for word in ("--tensor-type", "=".join(pair))]

    def name_file(self, kind: str) -> str:
        """Return a file's type as its name has it: q8_0-mix if some matrix is asked to be of another type."""
        return f"{kind}-mix" if {self.embedding, self.output, *self.matrices.values()} - {None, kind} else kind


GraphType = Literal["fp32", "fp16", "int8", "int4", "q4f16"]
"""32 or 16 bits; 8 or 4 bits computed in float32; 4 bits computed in float16."""
GRAPH_FILES: dict[GraphType, str] = {
    "fp32": "model.onnx",
    "fp16": "model_fp16.onnx",
    "int8": "model_int8.onnx",
    "int4": "model_q4.onnx",
    "q4f16": "model_q4f16.onnx",
}
GraphStack = Literal["encoder", "decoder"]
STACK_FILES: dict[GraphStack, dict[GraphType, str]] = {
    "encoder": {kind: f"encoder_{file}" for kind, file in GRAPH_FILES.items()},
    "decoder": {kind: f"decoder_model_merged{file.removeprefix('model')}" for kind, file in GRAPH_FILES.items()},
}
"""Stack of an encoder-decoder → files of its graphs. A merged decoder reads a target from its start, and goes on."""


def name_graph(kind: GraphType, stack: GraphStack | None) -> str:
    """Return the file of a graph, of a model as a whole or of one of its stacks."""
    return GRAPH_FILES[kind] if stack is None else STACK_FILES[stack][kind]


def all_graph_files() -> tuple[str, ...]:
    """Return all names that files of graphs have."""
    return tuple(file for files in (GRAPH_FILES, *STACK_FILES.values()) for file in files.values())


"""Type → file, by the names that the Hub's ONNX models have."""
ExportType = Literal[GraphType, GgufType]
ROUNDED_TYPES: tuple[GraphType, ...] = ("int8", "int4", "q4f16")
"""Types with rounded weights: validated by the task's metric instead of by a tolerance on outputs."""
