"""Parts of samples: which of them, and how much of each."""

import torch

from ckpt_prune.measure.samples.samples import ShortWindows, SpreadSamples, TokenWindows

WINDOWS = TokenWindows(torch.arange(7 * 5).view(7, 5), "7 of a.txt")


def test_some_samples_are_taken_from_all_over():
    some = SpreadSamples(WINDOWS, 3)
    assert (len(some), some.tokens, some.fingerprint) == (3, 5, WINDOWS.fingerprint)
    assert some.batch(slice(0, 3))["input_ids"][:, 0].tolist() == [0, 2 * 5, 4 * 5]
    assert some.batch(slice(1, 9))["input_ids"].tolist() == WINDOWS.windows[[2, 4]].tolist()


def test_windows_are_cut_to_their_first_tokens():
    short = ShortWindows(WINDOWS, 2)
    assert (len(short), short.tokens, short.fingerprint) == (7, 2, WINDOWS.fingerprint)
    assert short.batch(slice(5, 7))["input_ids"].tolist() == [[25, 26], [30, 31]]
