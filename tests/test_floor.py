"""`tools/bench_floor.py`: what it counts for a tiny model, against counts by hand. No speed is measured."""

from collections import Counter

import pytest

from ckpt_prune.model.model import Model
from tests.families import model_of
from tools.bench_floor import Block, Shape, Site, count_best, count_work

WINDOWS, TOKENS, BLOCKS = 4, 8, 2
HIDDEN, COLUMNS, CLASSES = 16, 40, 50
KEPT_HEADS, KEPT = 12, 30
"""Inputs of both sites that stay: three of four heads, and three quarters of the columns."""
PARAMETERS = 2 * CLASSES * HIDDEN + HIDDEN + BLOCKS * (4 * HIDDEN**2 + 3 * HIDDEN * COLUMNS + 2 * HIDDEN)
FORWARD = 2 * TOKENS * (4 * HIDDEN**2 + 3 * HIDDEN * COLUMNS) + 4 * TOKENS**2 * HIDDEN
BACK = FORWARD + 4 * TOKENS**2 * HIDDEN


def tiny(**changes: object) -> Model:
    config = {
        "model_type": "llama",
        "vocab_size": CLASSES,
        "hidden_size": HIDDEN,
        "intermediate_size": COLUMNS,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    return model_of(config | changes)


def narrowed(heads: int, columns: int) -> int:
    """FLOPs of a window through a block of so many inputs of both sites."""
    return 2 * TOKENS * (4 * HIDDEN * heads + 3 * HIDDEN * columns) + 4 * TOKENS**2 * heads


def gram(tokens: int, width: int) -> int:
    return tokens * width * (width + 1)


def counted(job: str, model: Model | None = None) -> dict[tuple[str, str], int]:
    return dict(count_work(model or tiny(), job, WINDOWS, TOKENS, 0.25))


def disk(written: int) -> dict[tuple[str, str], int]:
    return {("disk", "read"): 2 * PARAMETERS, ("disk", "write"): written}


IN_TURN = BLOCKS * FORWARD - 2 * TOKENS * HIDDEN * COLUMNS
"""The last block's output is nobody's input."""
SEQUENTIAL = (
    BLOCKS * (FORWARD - 2 * TOKENS * HIDDEN * (HIDDEN - KEPT_HEADS + COLUMNS - KEPT)) - 2 * TOKENS * HIDDEN * KEPT
)
NARROW_BYTES = 2 * (PARAMETERS - BLOCKS * HIDDEN * (4 * (HIDDEN - KEPT_HEADS) + 3 * (COLUMNS - KEPT)))


def test_norms_take_one_pass_of_each_block():
    assert counted("wanda-50") == {("blocks", "blocks"): WINDOWS * IN_TURN} | disk(2 * PARAMETERS)


def test_sites_run_with_what_stays_and_the_output_is_smaller():
    assert counted("wanda-sp") == {("blocks", "blocks"): WINDOWS * SEQUENTIAL} | disk(NARROW_BYTES)


def test_sparsegpt_has_a_gram_and_a_factor_of_every_input():
    widths, readers = (HIDDEN, HIDDEN, HIDDEN, COLUMNS), (3 * HIDDEN, HIDDEN, 2 * COLUMNS, HIDDEN)
    assert counted("sparsegpt-50") == {
        ("blocks", "blocks"): WINDOWS * IN_TURN,
        ("sums", "blocks"): BLOCKS * sum(gram(WINDOWS * TOKENS, width) for width in widths),
        ("factors", "cholesky float64"): sum(BLOCKS * width**3 // 3 for width in widths),
        ("factors", "float64"): BLOCKS * sum(o * d**2 for o, d in zip(readers, widths, strict=True)),
    } | disk(2 * PARAMETERS)


RIDGE = Counter(
    {
        ("blocks", "blocks"): WINDOWS * SEQUENTIAL,
        ("sums", "blocks"): BLOCKS * (gram(WINDOWS * TOKENS, HIDDEN) + gram(WINDOWS * TOKENS, COLUMNS)),
        ("factors", "cholesky float64"): BLOCKS * KEPT_HEADS**3 // 3 + BLOCKS * KEPT**3 // 3,
        ("factors", "float64"): BLOCKS * 2 * HIDDEN * (4 * KEPT_HEADS + KEPT_HEADS**2 + 10 * KEPT + KEPT**2),
    }
)


def test_ridge_solves_for_what_stays_at_every_site():
    assert counted("ridge") == RIDGE | disk(NARROW_BYTES)


HEAD = 2 * HIDDEN * CLASSES
TRIED = narrowed(12, COLUMNS) + narrowed(8, COLUMNS) + 4 * narrowed(HIDDEN, 30) + narrowed(HIDDEN, 20)
"""Two shares of each space are dropped; of 40 columns also by each of three scores at the first share."""
BEST = RIDGE + Counter(
    {
        # Every window once more, and of the last of four folds, one window, gradients and seven variants.
        ("blocks", "blocks"): BLOCKS * (WINDOWS + 1) * FORWARD + (BLOCKS - 1) * BACK + BLOCKS * TRIED
        + (2 + 8) * TOKENS * HEAD,
        ("sums", "blocks"): BLOCKS * (
            gram(WINDOWS * TOKENS, HIDDEN) + gram(WINDOWS * TOKENS, COLUMNS) + 2 * gram(TOKENS, HIDDEN)
            + 2 * WINDOWS * TOKENS * HIDDEN * (HIDDEN + COLUMNS)
        ),
        ("sums", "float32"): BLOCKS * TOKENS * (3 * HIDDEN**2 + 3 * (COLUMNS**2 + 2 * HIDDEN * COLUMNS)),
        ("factors", "cholesky float64"): BLOCKS * (
            2 * HIDDEN**3 // 3 + 4 * COLUMNS**3 // 3 + 5 * KEPT_HEADS**3 // 3 + 5 * KEPT**3 // 3
        ),
        ("factors", "float64"): BLOCKS * (
            5 * HIDDEN**3 // 3 + HIDDEN**3 + 3 * HIDDEN**3
            + 5 * COLUMNS**3 // 3 + HIDDEN * COLUMNS**2 + 3 * (HIDDEN * COLUMNS**2 + 2 * HIDDEN**2 * COLUMNS)
            + 4 * HIDDEN * (4 * KEPT_HEADS + 10 * KEPT)
        ),
    }
)  # fmt: skip


@pytest.mark.parametrize("job", ["best", "best-uniform"])
def test_best_has_a_dense_pass_gradients_and_trials_besides(job):
    assert counted(job) == BEST | disk(NARROW_BYTES)


def test_scales_take_one_epoch_on_other_windows():
    narrow = narrowed(KEPT_HEADS, KEPT)
    back = narrow + 4 * TOKENS**2 * KEPT_HEADS
    epoch = WINDOWS * (BLOCKS * FORWARD + 2 * BLOCKS * narrow + (BLOCKS - 1) * back + 3 * TOKENS * HEAD)
    # One window is measured before and after, by what both models predict.
    measured = 2 * (BLOCKS * narrow + 2 * TOKENS * HEAD)
    expected = BEST + Counter({("blocks", "blocks"): epoch + measured})
    assert counted("best-scaled") == expected | disk(NARROW_BYTES)


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_written_in_float32_and_proved_on_one_window(tied):
    written = 4 * (PARAMETERS - tied * CLASSES * HIDDEN)
    once = BLOCKS * FORWARD + TOKENS * HEAD
    expected = {("blocks", "float32"): 2 * once, ("disk", "read"): written // 2, ("disk", "write"): written}
    assert counted("export", tiny(tie_word_embeddings=tied)) == expected


def test_gptq_does_what_sparsegpt_does_and_writes_four_bits():
    model = tiny(hidden_size=64, intermediate_size=128, head_dim=16)
    masked, rounded = counted("sparsegpt-50", model), counted("GPTQ", model)
    weights = BLOCKS * (4 * 64 * 64 + 3 * 64 * 128)
    saved = masked["disk", "write"] - rounded.pop(("disk", "write"))
    # Half a byte for a weight, a scale of two bytes for 64; shapes, of two numbers each, are stored besides.
    assert saved == weights * 2 - weights // 2 - weights // 64 * 2 - BLOCKS * 7 * 16
    assert rounded == {key: count for key, count in masked.items() if key != ("disk", "write")}


def test_wide_sites_are_ordered_and_chosen_in_float32_and_tried_on_one_token_of_four():
    def of(width: int) -> dict[tuple[str, str], int]:
        site = Site(HIDDEN, width, width // 2, 3)
        return count_best(Shape(1, 32, 32, 8, TOKENS, HEAD, Block(9, 1), Block(9, 1), ((width, 4),), (site,), (0, 0)))

    narrow, wide = of(1024), of(1025)
    assert ("factors", "cholesky float32") not in narrow
    assert wide["factors", "cholesky float32"] == 4 * 1025**3 // 3 + 5 * 512**3 // 3
    assert wide["factors", "cholesky float64"] == 512**3 // 3  # the fit itself
    assert narrow["sums", "float32"] == 3 * 64 * (1024**2 + 2 * HIDDEN * 1024)
    assert wide["sums", "float32"] == 3 * 16 * (1025**2 + 2 * HIDDEN * 1025)
