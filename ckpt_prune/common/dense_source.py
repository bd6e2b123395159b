"""The dense model that a pruned one was made from, as its report names it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DenseSource:
    """A dense model.

    Attributes:
        name: as a report has it, without folders.
        folder: None if it was not found, or reads text by other tokens.
        verdict: what the report of the pruned model says of it beside this one; None if it says nothing.
        data: that this was measured on, in words.
        other_tokens: whether it reads text by other tokens, so that nothing is compared with it token by token.
    """

    name: str
    folder: Path | None
    verdict: str | None = None
    data: str = ""
    other_tokens: bool = False

    @property
    def lacking(self) -> str:
        """A line that says what was left out because the model was not found, and what was found when it was there."""
        if self.other_tokens:
            return (
                f"not compared with the dense model: {self.name} has another tokenizer; `evaluate --against` compares "
                "them in bits per byte"
            )
        earlier = ""
        if self.verdict is not None:
            on = f" on {self.data}" if self.data else ""
            earlier = f". As a checkpoint, it was measured{on}: {self.verdict}"
        return (
            f"not compared with the dense model: {self.name} lies neither beside the model, nor here, nor in the Hub's "
            f"cache, and outputs keep no path to it; `export` and `validate` take it as --dense MODEL{earlier}"
        )
