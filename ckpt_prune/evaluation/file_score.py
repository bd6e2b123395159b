"""The score of a file that holds a model, for whichever runtime: its size, and what its predictions lose."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev


def standard_error(several: Sequence[float]) -> float | None:
    """Return the standard error of the mean of independent figures, one of each window; None of a single one."""
    return stdev(several) / math.sqrt(len(several)) if len(several) > 1 else None


@dataclass(frozen=True)
class FileScore:
    """A file's predictions beside a model's.

    A file with fewer tokens does not predict the same ones. Its `kl` is what the text costs more, in nats a token as
    the model splits it; on average over text that the model writes, that is the KL. `perplexity` is of such a token,
    too. Files of models that predict no tokens have no perplexity. If a file makes features, `kl` is the share of
    their energy that is lost, twice what the mean cosine lacks of 1, and `top1` is that cosine.

    Attributes:
        bytes: of the file.
        kl, kl_median, kl_90, kl_99: KL(model ‖ file) in nats a token: mean, and what half, 90 % and 99 % do not pass.
        kl_error: standard error of the mean over the windows; None if that is not known.
        kl_of: the mean of each text, by its name; empty if it was measured on one.
        accepted: chance that the model accepts a token of the file in speculative decoding.
        top1: share of the tokens of which both hold the same one likeliest.
        perplexity: of the file.
        speeds: tokens a second, read and generated; of graphs read alone, and of images.
        ranks: Spearman's, of the cosines of all pairs of texts in the file and in the model; None if that is not known.
        ms: what the file takes of the work that a time is asked for.
    """

    bytes: int
    kl: float
    perplexity: float | None
    speeds: tuple[float, ...]
    kl_median: float | None = None
    kl_90: float | None = None
    kl_99: float | None = None
    accepted: float | None = None
    top1: float | None = None
    ranks: float | None = None
    ms: float | None = None
    kl_of: Mapping[str, float] = field(default_factory=dict)
    kl_error: float | None = None

    @property
    def words_of_kl(self) -> str:
        """The mean, and that of each text behind it, if there are several."""
        of_texts = ", ".join(f"{name} {kl:.3f}" for name, kl in self.kl_of.items())
        mean = f"{self.kl:.3f}" + ("" if self.kl_error is None else f" ± {self.kl_error:.3f}")
        return f"{mean} ({of_texts})" if of_texts else mean
