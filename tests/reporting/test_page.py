"""The page: well-formed, complete in itself, readable in both schemes, and nothing in it from a report is markup."""

import re
from importlib import resources
from itertools import product
from pathlib import Path

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.reporting.document import read_document
from ckpt_prune.reporting.page import page
from ckpt_prune.reporting.plots import KINDS, PLOTS, SPACES
from ckpt_prune.reporting.plots import words as space_words

from .examples import (
    Drawn,
    Json,
    bare,
    elsewhere,
    kept,
    layer,
    learned,
    linear,
    masked,
    parse,
    plan,
    recovery,
    report,
    site,
    words,
    write,
)

STYLE = resources.files("ckpt_prune.reporting").joinpath("style.css").read_text(encoding="utf-8")


@pytest.fixture
def rendered(tmp_path):
    def render(value: Json, name: str = "out/ckpt_prune.json") -> str:
        return page(read_document(write(tmp_path / name, value)))

    return render


def rich() -> list[Json]:
    errors = {"error_uncompensated": 0.4, "error_compensated": 0.1, "floor": 0.05, "rho2": 0.7}
    heads = [{"head": h} | errors for h in range(2)]
    qk = [site(b, "qk", consumer=None, method="logit", heads=heads) for b in range(3)]
    return qk + [site(b, "mlp", error_uncompensated=0.5 + b / 10) for b in range(3)]


def plots(html: str) -> dict[str, Drawn]:
    found = {}
    for figure in parse(html).iter("figure"):
        svg = next(svg for svg in figure.iter("svg") if svg.get("role") == "img")
        found[words(figure.find(".//h3"))] = Drawn(svg)
    return found


def table(html: str, index: int) -> list[list[str]]:
    found = list(parse(html).iter("table"))[index]
    return [[words(cell) for cell in row] for row in found.iter("tr")]


def facts(html: str) -> dict[str, str]:
    root = parse(html)
    return dict(zip(map(words, root.iter("dt")), map(words, root.iter("dd")), strict=True))


# ---- what it says ----------------------------------------------------------------------------------------------


def test_header(rendered):
    html = rendered(report(rich()))
    root = parse(html)
    assert words(root.find(".//title")) == words(root.find(".//h1")) == "tiny, pruned by corp"
    assert [words(p) for p in root.find(".//header").iter("p")] == [
        "Affine.",
        "Compensation lowers the error on calibration data at 6 of 6 sites.",
        "Compensation lowers the error on held-out data at 6 of 6 sites.",
    ]
    assert facts(html) == {
        "Source": "tiny",
        "Fingerprint": "f00d",
        "Method": "CORP, eq. 7",
        "Recipe digest": "beef",
        "Calibration": "target dense, statistics cafe, 128 samples, window 16, 2,048 tokens, 1 fold",
        "Stored as": "vit",
        "Written by": "ckpt_prune 0.1.0, torch 2.13.0, transformers 5.23.0",
    }


def test_header_of_a_plan(rendered):
    html = rendered(plan(rich(), container="remote", container_note="no slot"), "plan.json")
    assert words(parse(html).find(".//h1")) == "Plan for tiny, by corp"
    assert facts(html) == {
        "Source": "models/tiny",
        "Fingerprint": "f00d",
        "Method": "CORP, eq. 7",
        "Recipe digest": "beef",
        "Calibration": "/stats, digest cafe",
        "To be stored as": "remote code: no slot",
    }
    assert facts(rendered(plan([], statistics=None), "plan.json"))["Calibration"] == "none"
    assert list(plots(html)) == list(plots(rendered(report(rich()))))


def test_container_notes(rendered):
    container = {"model_type": "llama", "remote_code": True, "note": "q narrower than v"}
    assert facts(rendered(report([], container=container)))["Stored as"] == "remote code: q narrower than v"
    container["note"] = "stored as llama with remote code (q narrower than v)"
    said = "llama with remote code (q narrower than v)"
    assert facts(rendered(report([], container=container)))["Stored as"] == said


def test_calibration_of_another_kind(rendered):
    """Images have no window; what a later version adds is shown under its own key."""
    calibration = {"target": "sequential", "samples": 1, "image_size": 224, "skipped": None, "names": ["a"]}
    html = rendered(report([], calibration=calibration))
    assert facts(html)["Calibration"] == "target sequential, 1 sample, image size 224"


def test_costs(rendered):
    assert table(rendered(report([])), 0) == [
        ["", "before", "after", "share"],
        ["Parameters", "2.00M", "1.50M", "75.0%"],
        ["Bytes", "8.00 MiB", "6.00 MiB", "75.0%"],
        ["FLOPs of 1,024 tokens", "4.00B", "3.00B", "75.0%"],
    ]


def test_where_compensation_fails(rendered):
    """Sites where nothing is dropped or nothing was to compensate do not count."""
    sites = [site(b, error_compensated=0.6, error_held_out=0.5) for b in range(9)]
    sites += [site(9), site(9, "qk", error_held_out=None), site(10, kept=list(range(8))), site(11, method="none")]
    html = rendered(report(sites))
    names = ", ".join(f"MLP of block {b}" for b in range(8))
    assert [words(p) for p in parse(html).find(".//header").iter("p")][1:] == [
        f"Compensation lowers the error on calibration data at 2 of 11 sites; not at {names} and 1 more.",
        f"Compensation lowers the error on held-out data at 1 of 10 sites; not at {names} and 1 more.",
    ]


def test_the_table_of_sites(rendered):
    html = rendered(report([site(0, kept=[1]), bare(1), site(0, "qk", error_held_out=None, strength=None)]))
    assert table(html, 1) == [
        [
            *["block", "space", "compensation", "λ", "kept", "uncompensated", "compensated", "held out", "floor"],
            *["ρ²", "effective rank", "k95", "active"],
        ],
        ["0", "MLP", "affine", "0.01", "1 of 8", *["0.500", "0.250", "0.300", "0.125", "0.750", "2", "4", "0.500"]],
        ["0", "Q/K", "affine", "–", "4 of 8", *["0.500", "0.250", "–", "0.125", "0.750", "2", "4", "0.500"]],
        ["1", "MLP", "none", "–", "4 of 8", *["–"] * 8],
    ]


def test_columns_without_a_figure_are_left_out(rendered):
    assert table(rendered(report([bare(0)])), 1) == [
        ["block", "space", "compensation", "λ", "kept"],
        ["0", "MLP", "none", "–", "4 of 8"],
    ]


def test_the_table_of_heads(rendered):
    html = rendered(report(rich()))
    assert table(html, 2)[:3] == [
        ["block", "space", "head", "uncompensated", "compensated", "floor", "ρ²"],
        ["0", "Q/K", "0", "0.400", "0.100", "0.0500", "0.700"],
        ["0", "Q/K", "1", "0.400", "0.100", "0.0500", "0.700"],
    ]
    assert [words(s) for s in parse(html).iter("summary")] == ["Every site", "Every head"]
    assert [words(s) for s in parse(rendered(report([site(0)]))).iter("summary")] == ["Every site"]


def test_nothing_measured(rendered):
    html = rendered(report([bare(0)]))
    assert plots(html) == {}
    assert "Nothing was measured per layer: errors and diagnostics need statistics with Grams" in words(parse(html))


# ---- masks and rotations ---------------------------------------------------------------------------------------


def said(html: str) -> list[str]:
    return [words(p) for p in parse(html).find(".//header").iter("p")][1:]


def summaries(html: str) -> list[str]:
    return [words(s) for s in parse(html).iter("summary")]


DENSE = "Shapes stay as they were: parameters, bytes and FLOPs count zeros like any other weight."


def test_a_masked_output(rendered):
    linears = [linear(b, m) for b in range(2) for m in ("self_attn.q_proj", "mlp.down_proj")]
    linears[3] |= {"rows": 2000, "columns": 500, "zeros": 500_003, "error": 0.5}
    html = rendered(masked(linears))
    assert said(html) == [
        f"50.00% of 1.00M weights in 4 linears were zeroed (sparsegpt, 2:4). {DENSE}",
        "The error of their outputs on calibration data is 0.312 on average, 0.500 at most (down of block 1).",
    ]
    assert facts(html)["Mask"] == "sparsegpt, 2:4"
    assert "Rotation" not in facts(html)
    assert list(plots(html)) == ["Output error of the linears"]
    assert summaries(html) == ["Every linear"]
    assert table(html, 1) == [
        ["block", "linear", "weight", "shape", "zeros", "share", "error", "damping", "dead inputs"],
        *(
            [b, kind, f"model.layers.{b}.{m}.weight", *cells]
            for b, kind, m, cells in (
                ("0", "q", "self_attn.q_proj", ["8 × 4", "16", "50.0%", "0.250", "0.0100", "0"]),
                ("0", "down", "mlp.down_proj", ["8 × 4", "16", "50.0%", "0.250", "0.0100", "0"]),
                ("1", "q", "self_attn.q_proj", ["8 × 4", "16", "50.0%", "0.250", "0.0100", "0"]),
                ("1", "down", "mlp.down_proj", ["2,000 × 500", "500,003", "50.0%", "0.500", "0.0100", "0"]),
            )
        ),
    ]


def test_where_more_damping_was_needed(rendered):
    damps = [0.01, 0.1, None, 0.0100001]
    assert said(rendered(masked([linear(b, damp=d) for b, d in enumerate(damps)])))[2:] == [
        "At 2 of 4 linears the Hessian was singular with the damping of 0.01 asked for and was given more: "
        "q of block 1 (0.1), q of block 3 (0.0100001). More calibration data may help."
    ]
    (sentence,) = said(rendered(masked([linear(b, damp=1.0) for b in range(10)])))[2:]
    assert sentence.startswith("At 10 of 10 linears")
    named = ", ".join(f"q of block {b} (1)" for b in range(8))
    assert sentence.endswith(f"and was given more: {named} and 2 more. More calibration data may help.")
    unknown = masked([linear(0, damp=1.0)])
    unknown["recipe"]["mask"] = None
    assert len(said(rendered(unknown))) == 2


def test_a_mask_without_errors(rendered):
    """Nothing calls for a calibration that could not change that."""
    bare_linears = [linear(0, error=None, damp=None, dead=None)]
    html = rendered(masked(bare_linears, mask={"method": "magnitude", "pattern": "unstructured", "ratio": 0.5}))
    assert said(html) == [
        f"50.00% of 32 weights in 1 linear were zeroed (magnitude, unstructured). {DENSE}",
        "The error of their outputs was not measured: a magnitude mask looks at no calibration data.",
    ]
    assert plots(html) == {}
    assert "Over depth" not in html
    assert "Nothing was measured" not in html
    assert table(html, 1)[0] == ["block", "linear", "weight", "shape", "zeros", "share"]
    assert said(rendered(masked(bare_linears)))[1] == (
        "The error of their outputs was not measured: it needs --diagnostics and the Grams of their inputs."
    )


def test_rotations_of_every_block(rendered):
    html = rendered(masked([linear(0)], learned(1, 50.0, 20.0, 15), learned(0, 50.0, 40.0, 3)))
    assert said(html)[2:] == [
        "Entropy of the wanda importance of weights: 100 nats before rotation (per-layer), 60 nats after (-40.0%), "
        "in 3 to 15 steps per block."
    ]
    assert facts(html)["Rotation"] == "per-layer"
    plot = plots(html)["Entropy of the importance"]
    assert plot.unit == "nats"
    assert plot.tooltips() == [
        "block 0\nbefore rotation: 50\nafter rotation: 40, 3 steps",
        "block 1\nbefore rotation: 50\nafter rotation: 20, 15 steps",
    ]
    assert summaries(html) == ["Every linear", "Every rotation"]
    assert table(html, 2) == [
        ["blocks", "entropy before (nats)", "entropy after (nats)", "change", "steps"],
        ["0", "50", "40", "-20.0%", "3"],
        ["1", "50", "20", "-60.0%", "15"],
    ]


def test_a_shared_rotation(rendered):
    html = rendered(masked([linear(0)], learned(None, 100.0, 80.0, 1), kind="shared"))
    assert said(html)[2:] == [
        "Entropy of the wanda importance of weights: 100 nats before rotation (shared), 80 nats after (-20.0%), "
        "in 1 step."
    ]
    assert list(plots(html)) == ["Output error of the linears"]
    assert table(html, 2)[1:] == [["all", "100", "80", "-20.0%", "1"]]


def test_rotations_of_unknown_entropy_and_steps(rendered):
    entries = [learned(0), {"block": 1, "entropy_before": 0.0, "entropy_after": 0.0}, {"block": 2}]
    html = rendered(masked([linear(0)], *entries))
    assert len(said(html)) == 2
    assert table(html, 2)[2:] == [["1", "0", "0", "–", "–"], ["2", "–", "–", "–", "–"]]
    html = rendered(masked([linear(0)], entries[1]))
    assert said(html)[2:] == [
        "Entropy of the wanda importance of weights: 0 nats before rotation (per-layer), 0 nats after."
    ]
    same = rendered(masked([linear(0)], learned(0), learned(1)))
    assert said(same)[2].endswith("(-25.0%), in 20 steps per block.")


def test_an_older_report_has_nothing_of_masks(rendered):
    """Neither their keys, nor, since, anything under them."""
    made = report(rich())
    assert not {"mask", "rotation", "linears"} & set(made)
    assert rendered(made) == rendered(made | {"mask": None, "rotation": None, "linears": []})


def test_the_order_of_linears_does_not_matter(rendered):
    linears = [linear(b, error=0.1 * (b + 1)) for b in range(4)]
    assert rendered(masked(linears[::-1])) == rendered(masked(linears))


def test_nothing_from_a_masks_report_is_markup(rendered):
    mask = {"method": EVIL, "pattern": EVIL, "ratio": 0.5}
    evil = {"weight": EVIL, "kind": EVIL}
    made = masked([linear(0, **evil), linear(1, **evil)], learned(0), kind=EVIL, mask=mask)
    made["rotation"]["importance"] = EVIL
    made["linears"][0]["damp"] = 1
    html = rendered(made)
    root = parse(html)
    seen = EVIL.replace("\x07", "\ufffd")
    assert "script" not in {element.tag for element in root.iter()}
    assert facts(html)["Mask"] == f"{seen}, {seen}"
    assert facts(html)["Rotation"] == seen
    assert table(html, 1)[1][1:3] == [seen, seen]
    assert words(next(root.iter("li"))) == seen
    assert f"({seen}, {seen})" in said(html)[0]
    assert f"{seen} of block 0 (1)" in said(html)[2]
    assert f"Entropy of the {seen} importance" in said(html)[3]


# ---- recovery --------------------------------------------------------------------------------------------------


def test_a_recovered_output(rendered):
    layers = [layer(0), layer(1, mse_after=0.05, cka_after=0.9375), kept(2, mse_after=0.5, cka_after=0.75, epochs=4)]
    html = rendered(masked([linear(0)], recovery=recovery(), layers=layers))
    assert words(parse(html).find(".//h1")) == "tiny, pruned by sparse and recovered"
    assert said(html)[2:] == [
        "LaCo recovered 2 of 3 blocks against dense; the others kept their old weights.",
        "Mean squared error of the hidden states against the dense model, held-out samples, mean of 3 blocks: 0.500 "
        "before recovery, 0.267 after (-46.7%).",
        "Linear CKA of the hidden states against the dense model, held-out samples, mean of 3 blocks: 0.750 before "
        "recovery, 0.854 after.",
        "Errors of single linears, where measured, are from before recovery.",
    ]
    found = facts(html)
    assert {label: found[label] for label in found if label.startswith("Recover")} == {
        "Recovery": "LaCo, 2 of 3 blocks, after pruning",
        "Recovered against": "dense, fingerprint fade",
        "Recovery data": "modality text, data da7a, 128 samples, held out 13, window 256, 32,768 tokens",
        "Recovery settings": "10 epochs, lr 0.001, batch 8, accumulate 1, schedule cosine, held out 0.1, patience 3, "
        "seed 0",
    }
    drawn = plots(html)
    assert list(drawn) == [
        "Output error of the linears",
        "Error of the hidden states",
        "Linear CKA of the hidden states",
    ]
    assert drawn["Error of the hidden states"].tooltips()[1:] == [
        "block 1\nbefore recovery: 0.500\nstart: 0.400\nafter recovery: 0.0500",
        "block 2\nbefore recovery: 0.500\nstart: 0.400\nafter recovery: 0.500, old weights kept",
    ]
    cka = drawn["Linear CKA of the hidden states"]
    assert (cka.labels[1][0], cka.labels[1][-1]) == ("0", "1.0")
    assert summaries(html) == ["Every linear", "Every block"]
    assert table(html, 2) == [
        [
            *["block", "outcome", "epochs run", "MSE before", "MSE at the start", "MSE after"],
            *["CKA before", "CKA after"],
        ],
        ["0", "weights of epoch 9", "10", "0.500", "0.400", "0.250", "0.750", "0.875"],
        ["1", "weights of epoch 9", "10", "0.500", "0.400", "0.0500", "0.750", "0.938"],
        ["2", "old weights kept", "4", "0.500", "0.400", "0.500", "0.750", "0.750"],
    ]


def test_recovery_in_a_recipe(rendered):
    """Each block right after it was pruned, of some blocks and modules only."""
    made = recovery(on_the_fly=True)
    made["settings"] |= {"only": "mlp", "layers": "0:2", "epochs": 1}
    html = rendered(report([site(0), site(1)], recovery=made, layers=[layer(0), layer(1)]))
    assert facts(html)["Recovery"] == "LaCo, 2 of 2 blocks, each block right after it was pruned"
    assert facts(html)["Recovery settings"].startswith("1 epoch, lr 0.001, ")
    assert "only mlp, layers 0:2," in facts(html)["Recovery settings"]
    assert said(html)[2] == "LaCo recovered 2 of 2 blocks against dense."
    assert said(html)[-1] == "Errors of single sites, where measured, are from before recovery."
    assert summaries(html) == ["Every site", "Every block"]


def test_where_training_diverged(rendered):
    layers = [layer(b, diverged=b != 3, mse_after=None) for b in range(12)]
    html = rendered(elsewhere(layers))
    assert said(html)[1] == (
        "Training diverged and was rolled back at "
        + ", ".join(f"block {b}" for b in (0, 1, 2, 4, 5, 6, 7, 8))
        + " and 3 more."
    )
    assert len(said(html)) == 3
    assert said(html)[2].startswith("Linear CKA")


def test_means_are_of_the_blocks_with_both_figures(rendered):
    layers = [layer(0, cka_before=None), layer(1, mse_before=0.0, mse_after=0.0), layer(2, mse_after=None)]
    layers[0] |= {"mse_before": float("nan")}
    assert said(rendered(elsewhere(layers)))[1:] == [
        "Mean squared error of the hidden states against the dense model, held-out samples, mean of 1 block: 0 before "
        "recovery, 0 after.",
        "Linear CKA of the hidden states against the dense model, held-out samples, mean of 2 blocks: 0.750 before "
        "recovery, 0.875 after.",
    ]


def test_perplexity_over_recovered_blocks(rendered):
    curve = [{"blocks": b, "perplexity": p} for b, p in ((4, 10.0), (0, 50.0), (1, None), (2, 20.5))]
    html = rendered(elsewhere([layer(b) for b in range(4)], recovery=recovery(perplexity_after=curve)))
    assert said(html)[-1] == (
        "Perplexity on held-out windows of 256 tokens: 50 as pruned, 10 with all blocks recovered."
    )
    plot = plots(html)["Perplexity over recovered blocks"]
    assert plot.unit == "perplexity"
    assert plot.tooltips() == [
        "blocks recovered 0\nperplexity: 50",
        "blocks recovered 2\nperplexity: 20.5",
        "blocks recovered 4\nperplexity: 10",
    ]
    assert plot.path("line", "after") == [[mark[:2] for mark in plot.marks("after")]]
    assert [t.text for t in plot.svg.iter("text") if t.get("class") == "unit"][-1] == "blocks recovered"
    assert summaries(html) == ["Every block", "Every perplexity"]
    assert table(html, 2) == [
        ["blocks recovered", "perplexity"],
        *(["0", "50"], ["1", "–"], ["2", "20.5"], ["4", "10"]),
    ]


@pytest.mark.parametrize(
    ("curve", "told"),
    [
        ([(0, 50.0)], "50 as pruned"),
        ([(1, 40.0), (2, 30.0), (3, 20.0)], "40 with the first block recovered, 20 with the first 3 blocks recovered"),
        ([(0, None), (2, 30.0)], "30 with the first 2 blocks recovered"),
    ],
)
def test_the_ends_of_the_curve_are_told(rendered, curve, told):
    made = recovery(perplexity_after=[{"blocks": b, "perplexity": p} for b, p in curve])
    del made["data"]["window"]
    sentences = said(rendered(elsewhere([layer(b) for b in range(4)], recovery=made)))
    assert sentences[-1] == f"Perplexity on held-out windows: {told}."


def test_a_model_that_was_pruned_elsewhere(rendered):
    html = rendered(elsewhere([layer(0), layer(1)]))
    assert words(parse(html).find(".//h1")) == "tiny, pruned elsewhere and recovered"
    assert table(html, 0)[1] == ["Parameters", "1.50M", "1.50M", "100.0%"]
    assert not {"Method", "Mask", "Rotation", "Calibration"} & set(facts(html))
    assert list(plots(html)) == ["Error of the hidden states", "Linear CKA of the hidden states"]
    assert "Nothing was measured" not in html
    assert "from before recovery" not in html
    assert summaries(html) == ["Every block"]


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_layers_without_figures(rendered, nothing):
    """There is nothing to plot, and no advice that is about sites."""
    empty = dict.fromkeys(("mse_before", "mse_start", "mse_after", "cka_before", "cka_after"), nothing)
    html = rendered(elsewhere([kept(0, **empty)]))
    assert plots(html) == {}
    assert "Over depth" not in html
    assert "Nothing was measured" not in html
    assert said(html) == ["LaCo recovered 0 of 1 blocks against dense; the others kept their old weights."]
    assert table(html, 1)[1] == ["0", "old weights kept", "10", *["–"] * 5]
    html = rendered(elsewhere([]))
    assert "Nothing was measured" not in html
    assert facts(html)["Recovery"] == "LaCo, after pruning"
    assert "Nothing was measured" not in rendered(report([bare(0)], recovery=recovery(), layers=[kept(0, **empty)]))


def test_an_older_report_has_nothing_of_recovery(rendered):
    made = report(rich())
    assert not {"recovery", "layers"} & set(made)
    assert rendered(made) == rendered(made | {"recovery": None, "layers": []})


def test_the_order_of_layers_does_not_matter(rendered):
    layers = [layer(b, mse_after=0.1 * (b + 1)) for b in range(4)]
    assert rendered(elsewhere(layers[::-1])) == rendered(elsewhere(layers))


def test_nothing_from_recovery_is_markup(rendered):
    made = recovery(dense={"name": EVIL, "fingerprint": EVIL}, settings={EVIL: EVIL}, data={EVIL: EVIL})
    html = rendered(elsewhere([layer(0)], recovery=made))
    seen = EVIL.replace("\x07", "\ufffd")
    assert "script" not in {element.tag for element in parse(html).iter()}
    assert facts(html)["Recovered against"] == f"{seen}, fingerprint {seen}"
    assert facts(html)["Recovery settings"] == facts(html)["Recovery data"] == f"{seen} {seen}"
    assert said(html)[0] == f"LaCo recovered 1 of 1 blocks against {seen}."


# ---- the plots in it -------------------------------------------------------------------------------------------


def test_points_stand_where_their_values_are(rendered):
    """Read off the page as a person would: by the numbers at the ticks."""
    errors = [0.5, None, 0.31, 0.44]
    html = rendered(report([site(b, error_uncompensated=e, floor=None) for b, e in enumerate(errors)]))
    plot = plots(html)["MLP: output error"]
    (y0, v0), (y1, v1) = plot.y[0], plot.y[-1]
    (x0, b0), (x1, b1) = plot.x[0], plot.x[-1]
    read = [
        (b0 + (x - x0) / (x1 - x0) * (b1 - b0), v0 + (y - y0) / (y1 - y0) * (v1 - v0))
        for x, y, _ in plot.marks("before")
    ]
    wanted = [(b, e) for b, e in enumerate(errors) if e is not None]
    assert read == [(pytest.approx(b, abs=1e-3), pytest.approx(e, abs=1e-4)) for b, e in wanted]
    (stroke,) = plot.path("line", "before")
    assert len(stroke) == 2
    assert plot.tooltips()[1] == "block 1\ncompensated: 0.250\nheld out: 0.300"


def test_legends_name_every_line(rendered):
    figures = {words(f.find(".//h3")): f for f in parse(rendered(report(rich()))).iter("figure")}
    assert [words(li) for li in figures["MLP: output error"].iter("li")] == [
        *["uncompensated", "compensated", "held out", "floor"]
    ]
    assert [words(li) for li in figures["ρ²: what the kept units predict"].iter("li")] == ["MLP", "Q/K"]
    assert all(next(li.iter("svg")).get("class") for f in figures.values() for li in f.iter("li"))


def test_captions_say_when_marks_lie_below_the_scale(rendered):
    sites = [site(b, error_compensated=e, floor=None) for b, e in enumerate((0.01, 0.0))]
    said = {
        words(f.find(".//h3")): words(f.find(".//figcaption/p")) for f in parse(rendered(report(sites))).iter("figure")
    }
    assert said["MLP: output error"].endswith("Hollow marks at the foot: zero, or too small for this scale.")
    assert "Hollow" not in said["Active inputs"]


def test_the_order_of_sites_does_not_matter(rendered):
    sites = [site(b, error_compensated=0.1 * (b + 1)) for b in range(4)]
    assert rendered(report(sites[::-1])) == rendered(report(sites))


# ---- complete in itself ----------------------------------------------------------------------------------------


def test_it_loads_and_runs_nothing(rendered):
    root = parse(rendered(report(rich())))
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "image", "use", "iframe", "object", "embed", "base", "a", "form"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {n for n in names if n in {"src", "href", "xlink:href", "srcset", "action"} or n.startswith("on")}
    assert not re.search(r"url\(|@import|@font-face|//", STYLE)
    policy = next(m.get("content") for m in root.iter("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_no_address_of_the_network_is_in_it(rendered):
    assert not re.search(r"https?:|//\w", rendered(report(rich())))


def test_it_is_a_page_of_its_own(rendered):
    html = rendered(report(rich()))
    assert html.startswith('<!doctype html>\n<html lang="en">')
    assert html.count("<style>") == 1
    assert STYLE in html
    metas = [dict(m.attrib) for m in parse(html).iter("meta")]
    assert {"charset": "utf-8"} in metas
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas


def test_the_same_report_gives_the_same_bytes(rendered):
    assert rendered(report(rich())) == rendered(report(rich()))


EVIL = '</title><script>alert("1")</script>&amp;\'\x07'


def test_nothing_from_a_report_is_markup(rendered):
    made = report(
        [site(0, EVIL, method=EVIL), site(1, EVIL)],
        source={"name": EVIL, "fingerprint": EVIL},
        recipe={"name": EVIL, "summary": EVIL, "source": EVIL},
        recipe_digest=EVIL,
        calibration={EVIL: EVIL, "target": EVIL},
        container={"model_type": EVIL, "note": EVIL},
        ckpt_prune=EVIL,
        torch=EVIL,
        transformers=EVIL,
    )
    html = rendered(made)
    root = parse(html)
    seen = EVIL.replace("\x07", "\ufffd")
    assert "script" not in {element.tag for element in root.iter()}
    assert words(root.find(".//h1")) == f"{seen}, pruned by {seen}"
    assert facts(html)["Calibration"] == f"{seen} {seen}, target {seen}"
    assert table(html, 1)[1][1:3] == [seen, seen]
    assert f"{seen}: output error" in plots(html)
    evil_plan = plan([site(0, EVIL)], model=EVIL, model_path=EVIL, statistics={"path": EVIL, "digest": EVIL})
    root = parse(rendered(evil_plan | {"container": EVIL, "container_note": EVIL}, "plan.json"))
    assert "script" not in {element.tag for element in root.iter()}


def test_half_a_surrogate_pair_is_no_text(rendered):
    with pytest.raises(UserError, match=r"ckpt_prune\.json is damaged \(text that is not Unicode: '\\ud800'\)"):
        rendered(report([], calibration={"target": "\ud800"}))


# ---- colours ---------------------------------------------------------------------------------------------------


def schemes() -> dict[str, dict[str, str]]:
    """The style sheet's colours, light and dark."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    read = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in (light, dark)]
    return {"light": read[0], "dark": read[1]}


def luminance(colour: str) -> float:
    """Relative luminance of sRGB (WCAG 2.1)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


STYLES = {line.style.name for plot in PLOTS for line in plot.lines}
STYLES |= {space.style.name for space in (SPACES | KINDS).values()} | {space_words("of another version").style.name}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(scheme):
    """WCAG's 4.5 for text, and more than its 3 for graphics, on the page of either scheme."""
    colours = schemes()[scheme]
    for name in {"ink", "soft"} | STYLES:
        assert contrast(colours[name], colours["page"]) >= 4.5, name


def test_both_schemes_set_the_same_colours():
    found = schemes()
    assert set(found["light"]) == set(found["dark"])
    assert found["light"]["page"] != found["dark"]["page"]
    assert "color-scheme: light dark" in STYLE


def test_every_line_has_a_colour_of_the_sheet():
    for name in STYLES:
        assert f".{name} {{ color: var(--{name}); }}" in STYLE


def test_no_colour_but_those_of_the_schemes_is_used():
    rules = re.sub(r"--[\w-]+: [^;]+;", "", STYLE)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?![^{]*\{)", rules)
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE))
    assert used <= set(schemes()["light"]) | {"band"}


def test_lines_of_one_plot_differ_in_mark_as_well():
    """For those who see no difference between the colours, and on paper."""
    groups = [[line.style for line in plot.lines] for plot in PLOTS] + [[s.style for s in SPACES.values()]]
    groups.append([s.style for s in KINDS.values()] + [space_words("of another version").style])
    for styles in groups:
        assert all(a.mark != b.mark and a.name != b.name for a, b in product(styles, styles) if a is not b)


def test_the_style_sheet_travels_in_the_wheel():
    """Hatch takes every file of the package; here that it is where the code looks."""
    assert Path(str(resources.files("ckpt_prune.reporting").joinpath("style.css"))).is_file()


def test_seconds_of_phases_stand_beside_their_stage(rendered):
    """Which ones there are, the report says; one without any, of an older version, has no such column."""
    stage = {"name": "blocks", "seconds": 12.345, "peak_bytes": 2**20, "device_peak_bytes": None}
    phases = {"calibration": 2.5, "<i>ranking</i>": 0.0312}
    stages = [stage | {"phases": phases}, stage | {"name": "rest", "phases": {"calibration": None}}]

    def cells(own: list[Json]) -> list[list[str]]:
        table = parse(rendered(report([], stages=own))).findall(".//details//table")[-1]
        return [[words(cell) for cell in row] for row in table.iter("tr")]

    assert cells(stages) == [
        ["stage", "seconds", "of these calibration", "of these <i>ranking</i>", "memory, largest so far"],
        ["blocks", "12.3", "2.50", "0.03", "1.00 MiB"],
        ["rest", "12.3", "–", "–", "1.00 MiB"],
    ]
    assert cells([stage]) == [["stage", "seconds", "memory, largest so far"], ["blocks", "12.3", "1.00 MiB"]]
