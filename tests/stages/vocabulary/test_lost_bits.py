"""What fewer tokens cost, against the stock model run whole."""

from math import log

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from ckpt_prune.evaluation.bits import PieceReader
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.stages.vocabulary.held_out import SplitText, piece_tokens, spread_pieces
from ckpt_prune.stages.vocabulary.lost_bits import HeldOutBits, draw_windows
from ckpt_prune.stages.vocabulary.pieces import Pieces, rebuild
from ckpt_prune.stages.vocabulary.settle import make_tokenizer
from tests.stages.vocabulary.tokenizers_of_tests import byte_level, content_of, page, save_llama

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits") / "llama"
    save_llama(folder, byte_level())
    streamed = StreamedModel.open(folder, torch.device("cpu"), torch.float32)
    return streamed, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double()


def log_p(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def test_tokens_are_expected_as_the_model_expects_them(made):
    streamed, stock = made
    tokenizer = make_tokenizer(content_of(byte_level()))
    pieces = spread_pieces(tokenizer, page(), 96, 3)
    expected, tokens = PieceReader(streamed, tokenizer, pieces).expected_tokens()
    wanted, count = torch.zeros(expected.shape, dtype=torch.float64), 0
    framed, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    before = framed[: len(framed) - len(plain)]
    for piece in pieces:
        encoded = tokenizer.encode(piece.text, add_special_tokens=False)
        first = next(at for at, (_, end) in enumerate(encoded.offsets) if end > piece.start)
        p = log_p(stock, [*before, *encoded.ids]).softmax(-1)[len(before) + first - 1 : -1]
        wanted += p.sum(0)
        count += len(p)
    assert tokens == count
    # Logits of a tiny model in float32: products of its few hundred inputs, in as many layers.
    assert torch.allclose(expected, wanted, rtol=2000 * EPS, atol=0)


def test_no_piece_is_longer_than_the_model_reads():
    """Also where a text has few words of many tokens, and many of few."""
    tokenizer = make_tokenizer(content_of(byte_level()))
    text = page() + "🙂ж" * 2000 + " the" * 3000
    for context in (16, 64, 256):
        pieces = spread_pieces(tokenizer, text, piece_tokens(context))
        assert all(piece.text in text for piece in pieces)
        assert max(len(tokenizer.encode(piece.text).ids) for piece in pieces) <= context // 2
    assert len(spread_pieces(tokenizer, page(), 64, 5)) >= 5


def test_windows_are_drawn_by_their_share_of_the_growth():
    assert draw_windows([0, 0, 0], 4) == []
    assert draw_windows([0, 5, 0], 3) == [1, 1, 1]
    growths = [1, 0, 3, 4]
    drawn = draw_windows(growths, 8)
    assert [drawn.count(window) for window in range(4)] == growths


def test_bits_lost_are_those_of_a_token_more_times_the_tokens_more(made):
    streamed, stock = made
    content = content_of(byte_level())
    pieces = Pieces.of(content, "tests")
    dense = make_tokenizer(content)
    kept = sorted(pieces.close(index for index in pieces.ids.values() if index % 7 or index < 100))
    smaller = make_tokenizer(rebuild(pieces, {old: new for new, old in enumerate(kept)}))
    text = SplitText.of("page", page() * 3)
    bits = HeldOutBits(streamed, dense, [text])
    (lost,) = bits.lost(smaller, kept, dict(enumerate(kept)))
    windows = spread_pieces(dense, text.held, piece_tokens(streamed.model.tokens))

    def read(tokenizer: Tokenizer, window, rows, head):
        encoded = tokenizer.encode(window.text, add_special_tokens=False)
        framed, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
        ids = [rows[each] for each in [*framed[: len(framed) - len(plain)], *encoded.ids]]
        first = len(ids) - sum(end > window.start for _, end in encoded.offsets)
        p = log_p(stock, ids)[:, head].log_softmax(-1)
        return -sum(float(p[at - 1, head.index(ids[at])]) for at in range(first, len(ids))) / log(2)

    whole = list(range(stock.config.vocab_size))
    counts = [[len(t.encode(w.text, add_special_tokens=False).ids) for w in windows] for t in (dense, smaller)]
    growths = [after - before for before, after in zip(*counts, strict=True)]
    drawn = draw_windows(growths, 8)
    assert min(growths) >= 0
    assert len({*drawn}) > 1
    changes = [read(smaller, windows[w], kept, kept) - read(dense, windows[w], whole, whole) for w in drawn]
    wanted = sum(change / growths[w] for change, w in zip(changes, drawn, strict=True)) / len(drawn) * sum(growths)
    total = sum(read(dense, window, whole, whole) for window in windows)
    assert lost.windows == len({*drawn})
    # A difference of two sums, each of some thousand terms that float32 makes.
    assert abs(lost.more - wanted) <= 2000 * EPS * total
    size = sum(window.bytes for window in windows)
    assert abs(bits.dense[0] / total - len(text.held.encode()) / size) < 0.05
