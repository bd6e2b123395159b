"""The mixtures that llama.cpp has names for: matrices that matter more have more bits than the name says."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gguf import GGMLQuantizationType as Kind


class MatrixPlace(NamedTuple):
    """The place of a matrix in its model.

    Attributes:
        block: number of the matrix's block, of `blocks`.
        shared: heads of queries that share one of keys and values.
        weighted: whether the importance of its inputs is known.
    """

    block: int
    blocks: int
    shared: float
    weighted: bool


Rule = tuple[Callable[[MatrixPlace], bool], Kind]
"""Whether a matrix has the type, by its place."""


def _any(_place: MatrixPlace) -> bool:
    return True


def _first(share: int) -> Callable[[MatrixPlace], bool]:
    """The first half of the blocks for a share of 2, the first eighth for 8."""
    return lambda place: place.block < place.blocks // share


def _below(count: int) -> Callable[[MatrixPlace], bool]:
    return lambda place: place.block < count


def _few_values(place: MatrixPlace) -> bool:
    """The matrix is small, as few heads have values of their own."""
    return place.shared >= 4


def _first_unweighted(place: MatrixPlace) -> bool:
    return not place.weighted and _first(8)(place)


def _first_weighted(place: MatrixPlace) -> bool:
    return place.weighted and _first(8)(place)


def _some(place: MatrixPlace) -> bool:
    """The first and the last eighth, and every third between."""
    block, eighth = place.block, place.blocks // 8
    return block < eighth or block >= 7 * place.blocks // 8 or (block - eighth) % 3 == 2


def _middle(place: MatrixPlace) -> bool:
    """All but the first and the last eighth."""
    return place.blocks // 8 <= place.block < 7 * place.blocks // 8


@dataclass(frozen=True)
class Mixture:
    """The types of a file's matrices.

    Attributes:
        base: of all that nothing else is said of.
        more: matrix of a block → rules, of which the first that holds counts.
        head: of the matrix that predicts tokens.
        embedding: of the embedding, if that is another matrix; None: `base`.
        experts: of the matrices of all experts, if they have another; models without any are refused.
        needs_importance: llama.cpp refuses to round to so few bits without the importance of inputs.
    """

    base: Kind
    more: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    head: Kind = Kind.Q6_K
    embedding: Kind | None = None
    experts: Kind | None = None
    needs_importance: bool = False

    def kind_of(self, matrix: str, place: MatrixPlace) -> Kind:
        if self.experts is not None and matrix.endswith("_exps"):
            return self.experts
        matrix = re.sub("_(sh)?exps?$", "", matrix)
        return next((kind for holds, kind in self.more.get(matrix, ()) if holds(place)), self.base)


def _least(base: Kind, output: Sequence[Rule] = ()) -> Mixture:
    """Two bits and fewer."""
    values, down = ((_few_values, Kind.Q4_K), (_any, Kind.Q2_K)), ((_first(8), Kind.Q2_K),)
    return Mixture(
        base,
        {"attn_v": values, "ffn_down": down, "attn_output": output},
        head=Kind.Q5_K,
        embedding=Kind.Q2_K,
        needs_importance=True,
    )


def _two_bits(base: Kind) -> Mixture:
    values, down = ((_few_values, Kind.Q4_K), (_any, Kind.IQ3_S)), ((_first(8), Kind.IQ3_S),)
    more = {"attn_v": values, "ffn_down": down, "attn_output": ((_any, Kind.IQ3_S),)}
    return Mixture(base, more, head=Kind.Q5_K, embedding=Kind.IQ3_S, needs_importance=True)


_OUTPUT_2 = ((_any, Kind.IQ2_XXS),)
_VALUES_4 = {"attn_v": ((_few_values, Kind.Q4_K),)}
_FOUR_BITS = {"attn_v": ((_few_values, Kind.Q5_K),), "ffn_down": ((_first_unweighted, Kind.Q5_K),)}
_SOME_SIX = dict.fromkeys(("attn_v", "ffn_down"), ((_some, Kind.Q6_K),))
MIXTURES: Mapping[str, Mixture] = {
    "iq1_s": _least(Kind.IQ1_S, _OUTPUT_2),
    "iq1_m": _least(Kind.IQ1_M, _OUTPUT_2),
    "iq2_xxs": _least(Kind.IQ2_XXS),
    "iq2_xs": _least(Kind.IQ2_XS),
    "iq2_s": _two_bits(Kind.IQ2_XS),
    "iq2_m": _two_bits(Kind.IQ2_S),
    "q2_k_s": Mixture(Kind.Q2_K, _VALUES_4 | {"ffn_down": ((_first(8), Kind.Q4_K),)}, needs_importance=True),
    "q2_k": Mixture(
        Kind.Q2_K,
        {
            "attn_v": ((_few_values, Kind.Q4_K), (_any, Kind.Q3_K)),
            **dict.fromkeys(("ffn_down", "attn_output"), ((_any, Kind.Q3_K),)),
        },
    ),
    "iq3_xxs": Mixture(
        Kind.IQ3_XXS,
        {
            **_VALUES_4,
            **dict.fromkeys(("attn_q", "attn_k"), ((_any, Kind.IQ2_S),)),
            "attn_output": ((_any, Kind.IQ3_S),),
        },
        head=Kind.Q5_K,
        embedding=Kind.IQ3_S,
        needs_importance=True,
    ),
    "iq3_xs": Mixture(
        Kind.IQ3_S,
        {
            **_VALUES_4,
            **dict.fromkeys(("attn_q", "attn_k"), ((_any, Kind.IQ3_XXS),)),
            **dict.fromkeys(("ffn_gate", "ffn_up"), ((_middle, Kind.IQ3_XXS),)),
        },
        needs_importance=True,
    ),
    "iq3_s": Mixture(Kind.IQ3_S, _VALUES_4),
    "iq3_m": Mixture(
        Kind.IQ3_S,
        {
            **dict.fromkeys(("attn_v", "attn_output", "attn_qkv"), ((_any, Kind.Q4_K),)),
            "ffn_down": ((_first(8), Kind.Q4_K),),
        },
    ),
    "q3_k_s": Mixture(Kind.Q3_K),
    "q3_k_m": Mixture(
        Kind.Q3_K,
        {
            "attn_v": ((_below(2), Kind.Q5_K), (_any, Kind.Q4_K)),
            "ffn_down": ((_first(16), Kind.Q5_K), (_any, Kind.Q4_K)),
            **dict.fromkeys(("attn_output", "attn_qkv"), ((_any, Kind.Q4_K),)),
        },
    ),
    "q3_k_l": Mixture(
        Kind.Q3_K,
        {
            **dict.fromkeys(("attn_v", "ffn_down", "attn_output"), ((_any, Kind.Q5_K),)),
            "attn_qkv": ((_any, Kind.Q4_K),),
        },
    ),
    "iq4_xs": Mixture(Kind.IQ4_XS, _FOUR_BITS),
    "iq4_nl": Mixture(Kind.IQ4_NL, _FOUR_BITS),
    "q4_k_s": Mixture(Kind.Q4_K, {"attn_v": ((_below(4), Kind.Q5_K),), "ffn_down": ((_first(8), Kind.Q5_K),)}),
    "q4_k_m": Mixture(Kind.Q4_K, {**_SOME_SIX, "attn_qkv": ((_any, Kind.Q5_K),)}),
    "q5_k_s": Mixture(Kind.Q5_K),
    "q5_k_m": Mixture(Kind.Q5_K, {**_SOME_SIX, "attn_qkv": ((_any, Kind.Q6_K),)}),
    "q6_k": Mixture(Kind.Q6_K),
    # Of plain types only what llama.cpp does where the importance of inputs is known.
    **{
        name: Mixture(base, {"ffn_down": ((_first_weighted, other),)}, head=Kind.Q8_0, embedding=Kind.Q8_0)
        for name, base, other in (("q4_0", Kind.Q4_0, Kind.Q4_1), ("q5_0", Kind.Q5_0, Kind.Q5_1))
    },
    **{name: Mixture(Kind[name.upper()], head=Kind.Q8_0, embedding=Kind.Q8_0) for name in ("q4_1", "q5_1", "q8_0")},
    "mxfp4": Mixture(Kind.Q8_0, head=Kind.Q8_0, embedding=Kind.Q8_0, experts=Kind.MXFP4),
    **{name: Mixture(Kind[name.upper()], head=Kind[name.upper()]) for name in ("f32", "f16", "bf16")},
}
"""Name of a file's type → the types of its matrices, as llama.cpp's own tool chooses them. With the plain types of 4
and 5 bits the head and the embedding have 8 here."""
FALLBACKS: Mapping[Kind, Kind] = {
    **dict.fromkeys((Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S), Kind.IQ4_NL),
    **dict.fromkeys((Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_XS), Kind.IQ4_NL),
    **{Kind.Q2_K: Kind.Q4_0, Kind.Q3_K: Kind.Q4_0},
    **{Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0},
}
"""Type with blocks of 256 → the one that llama.cpp takes for rows that are no multiple of it."""
LEAST = (Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS)
"""Types that llama.cpp gives to no matrix of a block without the importance of its inputs."""
