"""Tokens for which llama.cpp has rules of its own: ends of a text, and those that take the white space beside them.

It knows most ends by their text, as its `llama-vocab.cpp` lists them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ckpt_prune.common.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's token types."""
ENDS = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
     "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
     "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
     # Of code that is filled in: padding, repositories, files. Of several of a kind llama.cpp takes one.
     "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
     "<REPO>", "<reponame>", "<|file_sep|>"]
)  # fmt: skip
OTHER_ENDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Keys of a file that name an end beside its `eos`."""
_DEFAULT_END = {"gpt2": 11, "llama": 2}
"""Kind of tokenizer → the end of a file that names none."""
PHI = re.compile(r"(phi)-?(3)", re.IGNORECASE)
"""In the name of a file: llama.cpp then lets tokens take the white space behind them."""
PHI_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of such a file that do not. The file does not load without them."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def name_ends(ends: Iterable[int], eos: int | None, tokens: Sequence[str]) -> dict[str, int]:
    """Return the ends beside `eos` that a file names: as `eot` and `eom`, first those that llama.cpp does not know."""
    others = sorted((end for end in dict.fromkeys(ends) if end != eos), key=lambda end: tokens[end] in ENDS)
    return dict(zip(("eot", "eom"), others, strict=False))


def find_stops(values: Mapping[str, Any]) -> set[int]:
    """Return the ids at which llama.cpp ends a text, by the keys of a file and the texts of its tokens."""
    tokens: Sequence[str] = values["tokenizer.ggml.tokens"]
    stops = {index for index, token in enumerate(tokens) if token in ENDS}
    default = {"eos": _DEFAULT_END.get(values["tokenizer.ggml.model"])}
    named = (values.get(f"tokenizer.ggml.{key}_token_id", default.get(key)) for key in ("eos", *OTHER_ENDS))
    stops |= {index for index in named if index is not None and index < len(tokens)}
    texts = {tokens[index] for index in stops}
    if texts & {"<|call|>", "<|calls|>"} and texts & {"<|return|>", "<|flush|>"}:
        stops -= {index for index in stops if tokens[index] == "<|end|>"}
    if "<|tool_response>" in texts:
        stops -= {index for index in stops if tokens[index] == "</s>"}
    return stops


def describe_ends(values: Mapping[str, Any], ends: Iterable[int]) -> list[str]:
    """Return a line on ends at which llama.cpp goes on, and one on tokens at which it stops though `generate` does not.

    Args:
        values: keys of a file.
        ends: at which `generate` stops.
    """
    tokens, stops, named = values["tokenizer.ggml.tokens"], find_stops(values), dict.fromkeys(ends)
    left, more = [end for end in named if end not in stops], sorted(stops - named.keys())
    lines = []
    if left:
        lines.append(
            f"llama.cpp goes on after {name_tokens(tokens, left)}, where generate ends a text: a GGUF file has "
            "room for three ends (eos, eot, eom)"
        )
    if more:
        lines.append(f"llama.cpp also ends a text at {name_tokens(tokens, more)}, where generate goes on")
    return lines


def name_tokens(tokens: Sequence[str], ids: Sequence[int]) -> str:
    """Return the first of some tokens, in words."""
    return ", ".join(f"{tokens[index]} ({index})" for index in ids[:8]) + (", …" if len(ids) > 8 else "")


class Flags:
    """Compares the flags of the added tokens in a tokenizer.json with what llama.cpp does.

    Args:
        content: of the tokenizer.json.
        values: keys of the file.
    """

    def __init__(self, content: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._content, self._values = content, values
        types = values["tokenizer.ggml.token_type"]
        self._cut = {
            token
            for token, kind in zip(values["tokenizer.ggml.tokens"], types, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        }
        self.asked = {each["content"]: each for each in content["added_tokens"] if each["content"] in self._cut}

    def choose_name(self, name: str, model_type: str) -> str:
        """Return a name for the file with which llama.cpp treats its tokens as most of them ask for.

        A name with Phi-3 in it lets tokens take the white space behind them. A file that asks for it is so named if it
        is of that family, and no other file is.
        """
        plain = PHI.sub(r"\1_\2", name)
        candidates = [plain]
        if {*PHI_KEEPS, "</s>"} <= {*self._values["tokenizer.ggml.tokens"]} and (
            PHI.search(name) or model_type == "phi3"
        ):
            candidates.append(name if PHI.search(name) else f"{name} (Phi-3)")
        return min(candidates, key=lambda each: len(self._list_misread(each)))

    def _strips(self, name: str, token: str) -> bool:
        """Whether llama.cpp lets a token take the white space behind it."""
        return PHI.search(name) is not None and token in {*self._cut, "</s>"} - {*PHI_KEEPS}

    def _list_misread(self, name: str) -> list[str]:
        """Return the tokens which llama.cpp treats otherwise than they ask for."""
        return [
            token
            for token, flags in self.asked.items()
            if flags["lstrip"] or flags["single_word"] or flags["rstrip"] != self._strips(name, token)
        ]

    def check(self, name: str, prompts: Sequence[str]) -> list[str]:
        """Return a line that names the tokens around which llama.cpp splits text otherwise.

        Args:
            name: of the file.
            prompts: filled chat templates.

        Raises:
            UserError: the prompts become other tokens.
        """
        suspects = [
            token for token, flags in self.asked.items() if flags["normalized"] or token in self._list_misread(name)
        ]
        if not suspects:
            return []
        added = [
            each | dict.fromkeys(_FLAGS, False) | {"rstrip": self._strips(name, each["content"])}
            for each in self._content["added_tokens"]
        ]
        ours, theirs = (
            Tokenizer.from_str(json.dumps(content))
            for content in (self._content, {**self._content, "added_tokens": added})
        )

        def differ(text: str) -> bool:
            split = [each.encode(text, add_special_tokens=False).ids for each in (ours, theirs)]
            return split[0] != split[1]

        odd = [token for token in suspects if any(map(differ, (token, f"a {token} b", f"a{token}b", f"a\n{token}\nb")))]
        if not odd:
            return []
        what = ", ".join(odd[:8]) + (", …" if len(odd) > 8 else "")
        ask = [flag for flag in _FLAGS if any(self.asked[token][flag] for token in odd)] or ["no rstrip"]
        line = f"tokenizer.json has {', '.join(ask)} for {what}, which llama.cpp does not follow"
        if any(map(differ, prompts)):
            strip = "take the white space beside them out of it, which changes nothing for transformers, or "
            raise UserError(
                f"{line}: it would read the filled chat template as other tokens; "
                f"{strip if {'lstrip', 'rstrip'} & {*ask} else ''}take the chat template out of the folder"
            )
        return [f"{line}: texts in which they stand become other tokens"]
