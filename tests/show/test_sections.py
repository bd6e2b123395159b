"""Sections of every stage, against numbers worked out by hand."""

from typing import Any

import pytest

from ckpt_prune.job.records import SiteRecord
from ckpt_prune.model.descriptions import known_families, load_family, variants_of
from ckpt_prune.runner.sections import all_sections, name_report
from ckpt_prune.show.section import Figure, HeatMap, Section
from ckpt_prune.stages.mask.records import MaskedLinear
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.show_linears import KINDS, label_of
from ckpt_prune.stages.spaces.show import warn_of_sites
from tests.show.examples import (
    Json,
    elsewhere,
    layer,
    linear,
    make_kept_layer,
    make_learned_rotation,
    make_mask_report,
    recovery,
    report,
    site,
)


def sections(json_report: Json) -> dict[str, Section]:
    by_title = {section.title: section for section in all_sections(Report.read(json_report))}
    for section in by_title.values():
        titles = [figure.title for figure in section.figures]
        assert len(set(titles)) == len(titles)
        notes = [figure.note for figure in section.figures]
        assert all(note.startswith(("Lower", "Higher", "Where the", "Stronger colour is more")) for note in notes)
    return by_title


def figures(section: Section) -> dict[str, Figure]:
    return {figure.title: figure for figure in section.figures if isinstance(figure, Figure)}


def values(figure: Figure) -> dict[str, dict[int, float]]:
    return {line.name: {point.place: point.value for point in line.points} for line in figure.lines}


def texts(figure: Figure) -> dict[str, list[str]]:
    return {line.name: [point.text for point in line.points] for line in figure.lines}


def tables(section: Section) -> dict[str, list[list[str]]]:
    return {table.title: [list(table.columns), *map(list, table.rows)] for table in (*section.tables, *section.details)}


# ---- sizes and provenance ----------------------------------------------------------------------------------------


def test_sizes_and_provenance():
    by_title = sections(report([], latency=None, part="text"))
    assert tables(by_title["Size"])[""] == [
        ["", "before", "after", "share"],
        ["parameters", "2.00M", "1.50M", "75.0%"],
        ["bytes", "8.39 MB", "6.29 MB", "75.0%"],
        ["FLOPs / 1024 tokens", "4.00B", "3.00B", "75.0%"],
    ]
    assert tables(by_title["How it was made"])[""][1:] == [
        ["dense model", "tiny"],
        ["its fingerprint", "f00d"],
        ["recipe", "corp"],
        ["method from", "CORP, eq. 7"],
        ["digest of the recipe", "beef"],
        ["calibration", "target dense, statistics cafe, 128 samples, window 16, 2,048 tokens, 1 fold"],
        ["stored as", "vit"],
        ["written by", "ckpt_prune 0.1.0, torch 2.13.0, transformers 5.23.0"],
    ]
    assert name_report(Report.read(report([], part="text"))) == "tiny, its text part pruned by recipe corp"


@pytest.mark.parametrize("note", ["q narrower than v", "stored as llama with remote code (q narrower than v)"])
def test_a_note_on_the_container_stands_once(note):
    container = {"model_type": "llama", "remote_code": True, "note": note}
    facts = dict(tables(sections(report([], container=container))["How it was made"])[""][1:])
    assert facts["stored as"] in ("remote code: q narrower than v", "llama with remote code (q narrower than v)")


# ---- units of spaces ---------------------------------------------------------------------------------------------


def units(*sites: Json, **changes: Any) -> Section:
    return sections(report(list(sites), **changes))["Units"]


def heads(*errors: tuple[float, float | None], rho2: float | None = None) -> list[Json]:
    return [
        {"head": h, "error_uncompensated": a, "error_compensated": b, "floor": 9.0, "rho2": rho2}
        for h, (a, b) in enumerate(errors)
    ]


def test_units():
    qk = site(0, "qk", consumer=None, error_held_out=None, strength=None, effective_rank=None, k95=None, active=None)
    section = units(site(1, kept=[0]), qk | {"heads": heads((0.5, 0.1), rho2=0.5)}, site(0, "heads", width=16), site(0))
    assert section.sentences == [
        "The error is the share of the energy of a module's output (of queries and keys: of the attention logits) that "
        "pruning changes, before and after compensation: mean over blocks, calibration samples.",
        "It is not perplexity or accuracy.",
        "Compensation lowers the error on calibration samples at 4 of 4 sites.",
        "Compensation lowers the error on held-out samples at 3 of 3 sites.",
    ]
    assert tables(section)[""] == [
        ["space", "units kept", "error before", "after", "held out"],
        ["qk (dimensions of queries and keys)", "4 of 8", "0.5000", "0.2500", "–"],
        ["heads (heads, or KV groups)", "4 of 8", "0.5000", "0.2500", "0.3000"],
        ["mlp (columns of the MLP)", "1 to 4 of 8", "0.5000", "0.2500", "0.3000"],
    ]
    assert list(figures(section)) == [
        "MLP: output error",
        "Attention heads: output error",
        "Q/K: logit error",
        "Q/K: logit error per head",
        "ρ²: what the kept units predict",
        "ρ² per head",
        "MLP: rank of the inputs",
        "Attention heads: rank of the inputs",
        "Active inputs",
        "Units kept",
    ]
    names = ["uncompensated", "compensated", "held out", "floor", "ρ²", "effective rank", "k95", "active"]
    assert tables(section)["Every site"][:3] == [
        ["block", "space", "compensation", "λ", "kept", *names],
        ["0", "Q/K", "affine", "–", "4 of 8", "0.500", "0.250", "–", "0.125", "0.750", "–", "–", "–"],
        [
            "0",
            "Attention heads",
            "affine",
            "0.01",
            "4 of 8",
            *["0.500", "0.250", "0.300", "0.125", "0.750", "2", "4", "0.500"],
        ],
    ]
    assert tables(section)["Every head"] == [
        ["block", "space", "head", "uncompensated", "compensated", "floor", "ρ²"],
        ["0", "Q/K", "0", "0.500", "0.100", "9", "0.500"],
    ]


def test_errors_are_said_to_be_no_perplexity_and_to_hold_earlier_ones_where_they_do():
    assert units(site(0)).sentences[1] == "It is not perplexity or accuracy."
    drift, honest = units(site(0, share=0.5)).sentences[1:3]
    assert drift.endswith("errors of earlier blocks included (target drift).")
    assert honest == "It is not perplexity or accuracy."
    assert "These errors are from before recovery." in units(site(0), adapters={"modules": 1}).sentences


def test_sites_where_compensation_fails_are_named():
    """Those where nothing is dropped or nothing was to compensate do not count."""
    sites = [site(b, error_compensated=0.6, error_held_out=0.5) for b in range(9)]
    sites += [site(9), site(9, "qk", error_held_out=None), site(10, kept=list(range(8))), site(11, method="none")]
    sites.append(site(12, error_uncompensated=0.0, error_compensated=0.0, error_held_out=0.0))
    names = "mlp of blocks 0 to 8"
    assert units(*sites).sentences[2:] == [
        f"Compensation lowers the error on calibration samples at 3 of 12 sites; not at {names}.",
        f"Compensation lowers the error on held-out samples at 2 of 11 sites; not at {names}: use more samples or "
        "a larger lambda.",
    ]


def test_solves_that_stopped_short_are_told():
    records = [SiteRecord.read(site(block, residual=value)) for block, value in enumerate((1e-6, 2e-6, None))]
    assert list(warn_of_sites(records)) == [
        "The logits of block 1 are not solved to the end (relative residual 2e-06): use more samples or a larger "
        "lambda."
    ]


@pytest.mark.parametrize("value", ["0.5", True, [1.0], float("nan"), float("inf"), 10**400])
def test_what_is_no_finite_number_is_missing(value):
    drawn = figures(units(site(0, rho2=value), site(1)))
    assert values(drawn["ρ²: what the kept units predict"]) == {"MLP": {1: 0.75}}


@pytest.mark.parametrize(
    ("perplexity", "points"),
    [
        ({"100": 9.0, "1": 5.0, "0.01": 6.0, "1e+06": None}, {-2: 6.0, 0: 5.0, 2: 9.0}),
        ({"1": 5.0}, None),
        ({"1": 5.0, "3": 4.0}, None),
    ],
)
def test_perplexity_is_drawn_over_powers_of_ten(perplexity, points):
    section = units(site(0), lambda_search={"chosen": 1.0, "perplexity": perplexity})
    assert "Lambda 1 has the least calibration perplexity of those that were tried." in section.sentences
    figure = figures(section).get("Perplexity over λ")
    assert (None if figure is None else values(figure)["calibration text"]) == points
    assert figure is None or texts(figure)["calibration text"][1] == "5 (chosen)"


@pytest.mark.parametrize("spread", [None, 0.0312])
def test_what_other_draws_of_labels_would_move_is_said(spread):
    told = [sentence for sentence in units(site(0), spread=spread).sentences if "draws" in sentence]
    words = "Widths follow predicted losses, averaged over draws of labels: other draws would move the "
    words += "loss that is predicted of a site by about "
    assert told == ([] if spread is None else [f"{words}3.1%."])


# ---- masks, factors and rotations ----------------------------------------------------------------------------------


def test_what_a_mask_zeroes_and_what_was_lost_stand_beside_the_size():
    loss = {"of": "perplexity", "before": 10.0, "after": 12.5, "kl": 0.25, "agreement": 0.75, "data": "window 64"}
    section = sections(make_mask_report([linear(0)], loss=loss))["Size and loss"]
    zeros = linear(0)["zeros"]
    assert tables(section)[""][2] == ["not zero", "2.00M", "1.50M", f"{(1_500_000 - zeros) / 2_000_000:.1%}"]
    assert tables(section)[""][-1] == ["perplexity", "10.000", "12.500", "125.0%"]
    assert section.sentences[-1] == (
        "Measured on window 64: KL divergence from the dense model 0.2500 nats, the same first choice in 75.0%."
    )
    alike = sections(make_mask_report([linear(0)], loss=loss | {"kl": -3e-9}))["Size and loss"]
    assert "KL divergence from the dense model 0.0000 nats" in alike.sentences[-1]  # of rounding, and below 0


def test_a_mask():
    linears = [linear(b, m) for b in (1, 0) for m in ("self_attn.q_proj", "mlp.down_proj")]
    linears[1] |= {"rows": 2000, "columns": 500, "zeros": 500_003, "error": 0.5, "damp": 0.1}
    section = sections(make_mask_report(linears))["Mask"]
    assert section.sentences == [
        "Masked by sparsegpt 2:4: 50.00% zeros in 4 linear weights of 1.00M parameters.",
        "The error of their outputs on the calibration samples is 0.312 on average, 0.500 at most (down of block 1).",
        "1 of 4 Hessians were singular with damping 0.01 and took up to 0.1: use more samples (down of block 1).",
    ]
    assert [explanation[:24] for explanation in section.explanations] == [
        "The tensors keep their d",
        "For 2:4 torch.sparse.to_",
    ]
    assert values(figures(section)["Output error of the linears"]) == {
        "q": {0: 0.25, 1: 0.25},
        "down": {0: 0.25, 1: 0.5},
    }
    rows = tables(section)["Every linear"]
    assert rows[0] == ["block", "linear", "weight", "shape", "zeros", "share", "error", "damping", "dead inputs"]
    assert rows[4][:5] == ["1", "down", "model.layers.1.mlp.down_proj.weight", "2,000 × 500", "500,003"]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("magnitude", "a magnitude mask looks at no calibration data"),
        ("wanda", "it needs --diagnostics and the Grams of their inputs"),
    ],
)
def test_a_mask_without_errors(method, why):
    unmeasured = linear(0, error=None, damp=None, dead=None, zeros=0)
    mask = {"method": method, "pattern": "unstructured"}
    section = sections(make_mask_report([unmeasured], mask=mask))["Mask"]
    assert section.sentences == [f"Masked by {method}: 0.00% zeros in 1 linear weight of 32 parameters."]
    assert section.explanations == [f"The error of their outputs was not measured: {why}."]
    assert section.figures == []
    assert tables(section)["Every linear"][0] == ["block", "linear", "weight", "shape", "zeros", "share"]


def test_shares_of_zeros():
    shares = {"ratios": [0.25, 0.5], "kept": [2, 3]}
    mask = {"method": "wanda", "pattern": "2:4", "allocation": "owl", "shares": shares}
    assert sections(make_mask_report([linear(0)], mask=mask))["Mask"].sentences[1] == (
        "Zeros are shared out over blocks by owl: 2 to 3 of 4 weights kept."
    )
    mask |= {"pattern": "unstructured", "shares": {"ratios": [0.25, 0.5]}}
    assert sections(make_mask_report([linear(0)], mask=mask))["Mask"].sentences[1] == (
        "Zeros are shared out over blocks by owl: 25.0% to 50.0% zeros."
    )


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        ("model.layers.11.self_attn.v_proj.weight", "self_attn.v_proj"),
        ("model.layers.11.mlp.experts.11.up_proj.weight", "mlp.experts.11.up_proj"),
        ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.v_proj"),
        ("", ""),
    ],
)
def test_a_linear_without_a_kind_has_the_name_of_its_module(weight, kind):
    """In reports of before there was one."""
    assert label_of(MaskedLinear.read(linear(11, weight=weight, kind=None))) == kind
    assert label_of(MaskedLinear.read(linear(11, weight=weight, kind="gate"))) == "gate"


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name in known_families() for variant in (None, *variants_of(name))]
)
def test_every_linear_of_every_family_has_a_kind_of_its_own(name, variant):
    family = load_family(name, variant)
    assert set(family.labels) == set(family.linears)
    # Shared experts and MLPs in place of experts are of the same kinds.
    alike = {
        module for name in ("shared", "dense") if name in family.consumers for module in family.consumers[name].modules
    }
    labels = [label for module, label in family.labels.items() if module not in alike]
    assert set(labels) <= set(KINDS)
    assert len(set(labels)) == len(labels)
    attention = family.attention
    apart = "qkvo" if len({attention.query, attention.key, attention.value}) == 3 else "qo"
    assert set("" if attention.latent else apart) <= set(labels)


def test_factored_linears():
    factors = {"block": 0, "weight": "w", "kind": "q", "rows": 8, "columns": 8, "rank": 2, "error": 0.25, "change": 0.5}
    section = sections(report([], factored=[factors, factors | {"block": 1, "rank": 3, "error": 0.5}]))["Low rank"]
    assert section.sentences == [
        "2 linear modules became the product of two, of ranks 2 to 3: 80 of the 128 parameters of their weights are "
        "left (62.5%).",
        "The error of their outputs on the calibration samples is 0.375 on average, 0.500 at most (q of block 1).",
    ]
    assert list(figures(section)) == ["Output error of the factored linears", "Parameters of the factors"]
    assert tables(section)["Every linear"][1] == ["0", "q", "w", "8 × 8", "2", "50.0%", "0.250", "0.500"]


def test_rotations_of_every_block():
    curves = [{"curve": [[0, 10], [1, 8], [2, 6]]}, {"curve": [[0, 10], [1, 9]]}]
    rotations = [
        make_learned_rotation(1, 50.0, 20.0, 15) | curves[0],
        make_learned_rotation(0, 50.0, 40.0, 1) | curves[1],
    ]
    section = sections(make_mask_report([linear(0)], *rotations))["Rotation"]
    assert section.sentences == [
        "Entropy of the wanda importance of weights: 100 nats before rotation per-layer, 60 nats after (-40.0%), in 1 "
        "to 15 steps per block."
    ]
    assert "takes remote code" in section.explanations[0]
    entropy, steps = figures(section).values()
    assert texts(entropy) == {"before rotation": ["50", "50"], "after rotation": ["40, 1 step", "20, 15 steps"]}
    (line,) = steps.lines  # of those steps that every block took, as a share of the beginning
    assert [(point.place, point.value, point.low, point.high) for point in line.points] == [
        (0, 1.0, 1.0, 1.0),
        (1, pytest.approx(0.85), 0.8, 0.9),
    ]
    assert tables(section)["Every rotation"][1:] == [
        ["0", "50", "40", "-20.0%", "1"],
        ["1", "50", "20", "-60.0%", "15"],
    ]


def test_entropies_that_are_not_known_are_not_summed():
    nothing = {"block": 1, "entropy_before": 0.0, "entropy_after": 0.0}
    section = sections(make_mask_report([linear(0)], make_learned_rotation(0), nothing, {"block": 2}))["Rotation"]
    assert section.sentences == []
    assert tables(section)["Every rotation"][2:] == [["1", "0", "0", "–", "–"], ["2", "–", "–", "–", "–"]]
    (sentence,) = sections(make_mask_report([linear(0)], nothing))["Rotation"].sentences
    assert sentence.endswith("0 nats before rotation per-layer, 0 nats after.")


def test_a_map_of_the_importance():
    cells = {"weight": "o.weight", "rows": 4, "columns": 2, "before": [[1.0, 0.5]], "after": [[0.0, 4.0]]}
    largest = {"largest_before": 0.0123, "largest_after": 0.4}
    (heat_map,) = (
        figure
        for figure in sections(make_mask_report([linear(0)], make_learned_rotation(0) | {"map": cells | largest}))[
            "Rotation"
        ].figures
        if isinstance(figure, HeatMap)
    )
    assert heat_map.note == (
        "Stronger colour is more: means over cells of its 4 rows and 2 columns, from 0.500 to 4 times the mean, log "
        "scale. before rotation: the largest hundredth holds 1.2%; after: the largest hundredth holds 40.0%."
    )
    assert heat_map.panels == {"before": [[1.0, 0.5]], "after": [[0.0, 4.0]]}


def test_histograms_of_the_importance():
    """Bars from the first to the last that holds a weight in any of the four; the middle one of 61 is at 0 decibels."""
    bars = [0] * 29
    before = {"kept": [*bars, 0, 3, 1, *bars], "zeroed": [*bars, 4, 0, 0, *bars]}
    after = {"kept": [*bars, 0, 0, 4, *bars], "zeroed": [*bars, 4, 0, 0, *bars]}
    own = {"weight": "o.weight", "rows": 4, "columns": 2, "before": [[0.0]], "after": [[0.0]]}
    learned = make_learned_rotation(0) | {"map": own | {"histograms": {"before": before, "after": after}}}
    figures = sections(make_mask_report([linear(0)], learned))["Rotation"].figures
    drawn = {figure.title: figure.lines for figure in figures if "by importance" in figure.title}
    assert list(drawn) == [f"o.weight: weights by importance, {when} rotation" for when in ("before", "after")]
    (kept, zeroed), (kept_after, _) = drawn.values()
    assert [(point.place, point.value) for point in kept.points] == [(-2, 0), (0, 3), (2, 1)]
    assert [(point.place, point.value) for point in zeroed.points] == [(-2, 4), (0, 0), (2, 0)]
    assert [point.value for point in kept_after.points] == [0, 0, 4]


# ---- recovery ------------------------------------------------------------------------------------------------------


def recovery_section(*layers: Json, **changes: Any) -> Section:
    return sections(elsewhere(list(layers), recovery=recovery(**changes)))["Recovery"]


def test_recovery_of_blocks():
    layers = [layer(1, mse_after=0.05, cka_after=0.9375, curve=[0.4, 0.1]), layer(0, curve=[0.2, 0.1])]
    layers.append(make_kept_layer(2, mse_after=0.5, cka_after=0.75, epochs=4))
    section = recovery_section(*layers)
    assert section.sentences == [
        "2 of 3 blocks have new weights, trained towards the hidden states of dense; zeros stay zero.",
        "Hidden states on 13 held-out samples, mean over blocks, before → after: mean squared error 0.5 → 0.2667, "
        "linear CKA 0.75 → 0.8542.",
        "No epoch was better than the old weights in 1 block (2), with lr 0.001 and less: use more samples or epochs.",
    ]
    assert section.explanations == [
        "Recovered with LaCo: Layer-wise Compensation for Pruned Large Language Models, ACL 2026 long.1342: the "
        "weights that pruning left were trained, block by block after pruning, on 128 windows of 256 tokens, 13 "
        "of them held out, up to 10 epochs at a learning rate of 0.001."
    ]
    assert values(figures(section)["Error of the hidden states"])["after recovery"] == {0: 0.25, 1: 0.05, 2: 0.5}
    assert texts(figures(section)["Linear CKA of the hidden states"])["after recovery"] == [
        *("0.875", "0.938", "0.750, old weights kept")
    ]
    (line,) = figures(section)["Error over epochs"].lines
    assert [point.value for point in line.points] == pytest.approx([1.0, 0.375])
    assert tables(section)["Data and settings"][1:] == [
        ["dense model", "dense, fingerprint fade"],
        ["data", "modality text, digest of the data da7a, 128 samples, held out 13, window 256, 32,768 tokens"],
        [
            "settings",
            "10 epochs, lr 0.001, batch 8, accumulate 1, schedule cosine, held out 0.1, patience 3, seed 0",
        ],
    ]
    assert tables(section)["Every block"][1:] == [
        ["0", "weights of epoch 9", "10", "0.500", "0.400", "0.250", "0.750", "0.875"],
        ["1", "weights of epoch 9", "10", "0.500", "0.400", "0.0500", "0.750", "0.938"],
        ["2", "old weights kept", "4", "0.500", "0.400", "0.500", "0.750", "0.750"],
    ]


def test_blocks_to_warn_of():
    layers = [
        make_kept_layer(0, epochs=4),
        make_kept_layer(1, epochs=0),
        make_kept_layer(2, diverged=True),
        layer(3, diverged=True, mse_after=None),
    ]
    assert [sentence[:40] for sentence in recovery_section(*layers, layer(4, mse_after=0.75)).sentences[2:]] == [
        "The hidden states after block 3 are not ",
        "No epoch was better than the old weights",
        "After the last block the squared error i",
        "Training diverged in 2 blocks (2, 3) and",
    ]
    assert len(recovery_section(layer(0, mse_before=None, mse_after=0.75)).sentences) == 2


def test_perplexity_over_recovered_blocks():
    curve = [{"blocks": b, "perplexity": p} for b, p in ((4, 10.0), (0, 50.0), (1, None), (2, 20.5))]
    section = recovery_section(*(layer(b) for b in range(4)), perplexity_after=curve)
    assert section.sentences[-1] == (
        "Perplexity on held-out windows of 256 tokens: 50.000 with 0, inf with 1, 20.500 with 2, 10.000 with 4 of 4 "
        "blocks recovered."
    )
    figure = figures(section)["Perplexity over recovered blocks"]
    assert values(figure) == {"perplexity": {0: 50.0, 2: 20.5, 4: 10.0}}
    assert (figure.across, figure.joined) == ("blocks recovered", True)
    assert tables(section)["Every perplexity"][1:] == [["0", "50"], ["1", "–"], ["2", "20.5"], ["4", "10"]]


# ---- every report --------------------------------------------------------------------------------------------------


def test_an_older_report_says_the_same():
    """It has neither the keys nor anything under them."""
    json_report = report([site(0), site(1, "heads")])
    later = {"mask": None, "rotation": None, "linears": [], "recovery": None, "layers": []}
    assert sections(json_report) == sections(json_report | later)
