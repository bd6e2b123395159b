"""Shards: shares of one set of samples, measured on machines that share nothing and added later."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import SampleRange, Samples

_OPTION = re.compile(r"([1-9]\d{0,5})/([1-9]\d{0,5})")
_FINGERPRINT = re.compile(r"([0-9a-f]+)\[(\d+):(\d+)\] of (\d+)")


@dataclass(frozen=True)
class Shard(SampleRange):
    """A run of samples whose fingerprint says which of the whole set it holds."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the whole set, and which samples of it these are."""
        return _fingerprint_shard(self.samples.fingerprint, len(self.samples), self.start, self.stop)


def take_shard(samples: Samples, option: str) -> Shard:
    """Return the share of samples that `--shard I/N` names. Shards are contiguous, nearly equal, and together all."""
    match = _OPTION.fullmatch(option)
    number, count = (int(part) for part in match.groups()) if match else (1, 0)
    if number > count:
        raise UserError(f"--shard {option}: expected I/N, the I-th of N shards, I from 1 to N")
    if count > len(samples):
        raise UserError(
            f"--shard {option}: {len(samples)} samples make no {count} shards; say fewer, or more --samples"
        )
    return Shard(samples, len(samples) * (number - 1) // count, len(samples) * number // count)


def share_samples(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return True if two lists of fingerprints have samples in common."""
    return any(_overlap(x, y) for x in a for y in b)


def join_fingerprints(fingerprints: Sequence[str]) -> list[str]:
    """Join neighbouring shards, and all shards of a set: fewer fingerprints of the same samples."""
    whole_sets = [fingerprint for fingerprint in fingerprints if not _FINGERPRINT.fullmatch(fingerprint)]
    shards = sorted(_split_fingerprint(each) for each in fingerprints if _FINGERPRINT.fullmatch(each))
    joined: list[tuple[str, int, int, int]] = []
    for name, count, start, stop in shards:
        if joined and joined[-1][:2] == (name, count) and joined[-1][3] == start:
            start = joined.pop()[2]
        joined.append((name, count, start, stop))
    return [*whole_sets, *(_fingerprint_shard(*shard) for shard in joined)]


def _fingerprint_shard(name: str, count: int, start: int, stop: int) -> str:
    return name if stop - start == count else f"{name}[{start}:{stop}] of {count}"


def _overlap(a: str, b: str) -> bool:
    (name, _, start, stop), (other, _, begin, end) = _split_fingerprint(a), _split_fingerprint(b)
    return name == other and start < end and begin < stop


def _split_fingerprint(fingerprint: str) -> tuple[str, int, int, int]:
    """Return the whole set's fingerprint, its number of samples, the first sample and the one after the last."""
    match = _FINGERPRINT.fullmatch(fingerprint)
    if match is None:  # a whole set: more samples than any has
        return fingerprint, 0, 0, 2**63
    name, start, stop, count = match.groups()
    return name, int(count), int(start), int(stop)
