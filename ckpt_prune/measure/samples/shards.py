"""Shards: shares of one choice of samples that are measured apart, on machines that share nothing, and added."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import SampleRange, Samples

_ASKED = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")
_NAMED = re.compile(r"([0-9a-f]+)\[(\d+):(\d+)\] of (\d+)")


@dataclass(frozen=True)
class Shard(SampleRange):
    """Some samples of a row, which are all that is measured; the fingerprint says which of them."""

    @property
    def fingerprint(self) -> str:
        """Of all of them, and which these are."""
        return _named(self.samples.fingerprint, len(self.samples), self.start, self.stop)


def take_shard(samples: Samples, asked: str) -> Shard:
    """The share of samples that `--shard I/N` asks for; shards are contiguous, nearly equal, and together all samples.

    Raises:
        UserError: not of this form, or there are fewer samples than shards.
    """
    found = _ASKED.fullmatch(asked)
    number, of = (int(part) for part in found.groups()) if found else (1, 0)
    if number > of:
        raise UserError(f"--shard {asked}: expected I/N, the I-th of N shards, I from 1 to N")
    if of > len(samples):
        raise UserError(f"--shard {asked}: {len(samples)} samples make no {of} shards; say fewer, or more --samples")
    return Shard(samples, len(samples) * (number - 1) // of, len(samples) * number // of)


def overlapping(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether two lists of fingerprints name some samples both."""
    return any(_overlap(x, y) for x in a for y in b)


def united(fingerprints: Sequence[str]) -> list[str]:
    """The same samples in fewer fingerprints: neighbouring shards as one, and all shards of a row as the row."""
    whole = [each for each in fingerprints if not _NAMED.fullmatch(each)]
    shards = sorted(_parts(each) for each in fingerprints if _NAMED.fullmatch(each))
    joined: list[tuple[str, int, int, int]] = []
    for name, count, start, stop in shards:
        if joined and joined[-1][:2] == (name, count) and joined[-1][3] == start:
            start = joined.pop()[2]
        joined.append((name, count, start, stop))
    return [*whole, *(_named(*each) for each in joined)]


def _named(name: str, count: int, start: int, stop: int) -> str:
    return name if stop - start == count else f"{name}[{start}:{stop}] of {count}"


def _overlap(a: str, b: str) -> bool:
    (name, _, start, stop), (other, _, begin, end) = _parts(a), _parts(b)
    return name == other and start < end and begin < stop


def _parts(fingerprint: str) -> tuple[str, int, int, int]:
    """Fingerprint of a row, its samples, and the first and last of them; of a whole row more than any has."""
    found = _NAMED.fullmatch(fingerprint)
    if found is None:
        return fingerprint, 0, 0, 2**63
    name, start, stop, count = found.groups()
    return name, int(count), int(start), int(stop)
