"""From where on an output is called worse than its dense model."""

from pathlib import Path

import pytest

from ckpt_prune.evaluation.perplexity import PerplexityScore
from ckpt_prune.evaluation.quality import figures_of, judge, lines_of
from ckpt_prune.evaluation.results import ScoredResult
from ckpt_prune.job.report import Loss

WORSE, MUCH, USELESS = "worse than dense", "much worse than dense", "hardly of use beside dense"
BY_CHOICES = " by its first choices"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"of": "perplexity", "before": 20.0, "after": 20.9}, None),
        ({"of": "perplexity", "before": 20.0, "after": 21.1}, WORSE),
        ({"of": "perplexity", "before": 36.0, "after": 154.0}, MUCH),
        ({"of": "masked perplexity", "before": 4.0, "after": 21.0}, USELESS),
        ({"of": "perplexity", "before": 20.0, "after": 12.0}, None),
        ({"of": "perplexity", "before": 20.0, "after": None}, USELESS),
        ({"of": "perplexity", "before": 20.0, "after": 20.0, "agreement": 0.91}, None),
        ({"of": "perplexity", "before": 20.0, "after": 20.0, "agreement": 0.89}, WORSE + BY_CHOICES),
        ({"of": "perplexity", "before": 20.0, "after": 21.1, "agreement": 0.66}, MUCH + BY_CHOICES),
        ({"of": "top-1 accuracy", "agreement": 0.95, "kl": 0.1}, None),
        ({"of": "top-1 accuracy", "agreement": 0.2, "kl": 3.0}, USELESS + BY_CHOICES),
        ({"of": "perplexity", "before": 20.0, "after": 20.0, "agreement": 0.6, "kl": 0.004}, None),
        ({"of": "perplexity", "before": 20.0, "after": 20.0, "agreement": 0.006, "kl": 0.004}, USELESS + BY_CHOICES),
        # of 8 images two standard errors of a share of 90 % are 21 points, of 800 2 points
        ({"of": "top-1 accuracy", "agreement": 0.75, "kl": 0.3, "samples": 8}, None),
        ({"of": "top-1 accuracy", "agreement": 0.87, "kl": 0.3, "samples": 800}, WORSE + BY_CHOICES),
        ({"of": "top-1 accuracy", "before": 0.8, "after": 0.79}, None),
        ({"of": "top-1 accuracy", "before": 0.8, "after": 0.7}, MUCH),
        # of 16 images a fall must be more than two standard errors
        ({"of": "top-1 accuracy", "before": 0.75, "after": 0.6875, "agreement": 0.9375, "samples": 16}, None),
        ({"of": "top-1 accuracy", "before": 0.75, "after": 0.5, "agreement": 0.625, "kl": 0.01, "samples": 16}, None),
        ({"of": "top-1 accuracy", "before": 0.75, "after": 0.25, "agreement": 0.5, "kl": 0.01, "samples": 16}, USELESS),
        ({"of": "top-1 accuracy", "before": 0.75, "after": 0.69, "agreement": 0.94, "samples": 1600}, MUCH),
        ({"of": "cosine of the embeddings", "after": 0.993}, None),
        ({"of": "cosine of the embeddings", "after": 0.96}, WORSE),
        ({"of": "cosine of the embeddings", "after": 0.921}, MUCH),
    ],
)
def test_the_worst_figure_decides(figures, words):
    loss = judge(Loss(**figures, data="a text", against="dense"))
    if words is None:
        assert loss.verdict is None
    else:
        assert loss.verdict is not None
        assert loss.verdict.startswith(f"the output is {words}: ")


def test_shares_of_images_have_their_standard_errors():
    figures = {"before": 0.8, "after": 0.5, "kl": 0.4, "agreement": 0.9}
    (line,) = lines_of(Loss(of="top-1 accuracy", **figures, samples=16, data="16 images of d", against="m"))
    assert line == (
        "beside m, on 16 images of d: top-1 accuracy 50.00% ± 12.50% for 80.00% ± 10.00%, KL 0.4000 nats, the same "
        "first choice 90.0% ± 7.5%"
    )


def test_a_share_that_is_none_is_shown_as_it_is_written():
    loss = Loss(of="top-1 accuracy", before=2.0, after=0.5, samples=4, data="d")
    assert lines_of(loss) == ["beside the dense model, on d: top-1 accuracy 50.00% ± 25.00% for 200.00% ± 0.00%"]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Loss(of="top-1 accuracy", samples=0)


def test_what_is_said_of_an_output():
    loss = Loss(
        of="perplexity", before=20.5, after=30.25, kl=0.4, agreement=0.7, data="8 windows of a.txt", against="m"
    )
    figures = "perplexity 30.25 for 20.5, KL 0.4000 nats, the same first choice 70.0%"
    assert lines_of(judge(loss)) == [
        f"beside m, on 8 windows of a.txt: {figures}",
        f"the output is much worse than m: {figures}",
    ]
    alike = loss.model_copy(update={"kl": -3e-9, "agreement": 1.0})  # rounding
    assert figures_of(alike) == ["perplexity 30.25 for 20.5", "KL 0.0000 nats", "the same first choice 100.0%"]
    assert lines_of(judge(loss.model_copy(update={"after": 20.5, "agreement": 1.0}))) == [
        "beside m, on 8 windows of a.txt: perplexity 20.5 for 20.5, KL 0.4000 nats, the same first choice 100.0%"
    ]


def test_a_divergence_of_rounding_is_not_below_zero():
    score = PerplexityScore(perplexity=2.0, nll=0.69, tokens=8, window=8, windows=1)
    result = ScoredResult(Path("a"), score, Path("b"), score, -3e-9, 1.0)
    assert "KL divergence 0.0000 nats per token, top-1 agreement 100.0%" in result.paragraphs()
