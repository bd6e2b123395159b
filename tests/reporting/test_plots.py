"""Which plots a report gives, and with which values."""

import pytest

from ckpt_prune.job.records import MaskedLinear, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, Perplexity
from ckpt_prune.model.descriptions import known_families, load_family, variants_of
from ckpt_prune.report.figures import kind_of
from ckpt_prune.reporting.plots import KINDS, PLOTS, Figure, Line, Plot, Style, figure, figures, outcome, shown

from .examples import Json, bare, kept, layer, learned, linear, site


def figures_of(*sites: Json) -> dict[str, Figure]:
    found = figures([SiteRecord.read(s) for s in sites])
    assert len({f.title for f in found}) == len(found)
    return {f.title: f for f in found}


def values(plot: Figure) -> dict[str, dict[int, float]]:
    return {line.label: {point.place: point.value for point in line.points} for line in plot.series}


def heads(*errors: tuple[float, float], rho2: float | None = None) -> list[Json]:
    return [
        {"head": h, "error_uncompensated": a, "error_compensated": b, "floor": 9.0, "rho2": rho2}
        for h, (a, b) in enumerate(errors)
    ]


def test_every_plot_of_a_report_with_everything():
    qk = site(0, "qk", consumer=None, effective_rank=None, k95=None, active=None, heads=heads((0.5, 0.1), rho2=0.5))
    found = figures_of(qk, site(0, "heads", width=16), site(0, "mlp"), site(1, "mlp", kept=[0]))
    assert list(found) == [
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


def test_errors_are_relative_the_floor_too():
    plot = figures_of(site(0), site(1, error_uncompensated=0.2, floor=3.0, j0=6.0))["MLP: output error"]
    assert values(plot) == {
        "uncompensated": {0: 0.5, 1: 0.2},
        "compensated": {0: 0.25, 1: 0.25},
        "held out": {0: 0.3, 1: 0.3},
        "floor": {0: pytest.approx(0.125), 1: pytest.approx(0.1)},
    }
    assert plot.unit == "share of output energy"
    assert figures_of(site(0, "qk"))["Q/K: logit error"].unit == "share of logit energy"


@pytest.mark.parametrize("changes", [{"floor": None}, {"j0": None}, {"error_uncompensated": None}, {"j0": 0.0}])
def test_no_floor_where_it_cannot_be_relative(changes):
    assert "floor" not in values(figures_of(site(0, **changes))["MLP: output error"])


def test_the_floor_of_nothing_lost_is_zero():
    whole = site(0, error_uncompensated=0.0, error_compensated=0.0, j0=0.0, floor=0.0)
    assert values(figures_of(whole)["MLP: output error"])["floor"] == {0: 0.0}


def test_missing_values_are_gaps_and_lines_without_values_are_left_out():
    plot = figures_of(site(0), site(1, error_held_out=None), bare(2), site(3))["MLP: output error"]
    assert values(plot)["held out"] == {0: 0.3, 3: 0.3}
    plot = figures_of(*(site(b, error_held_out=None) for b in range(2)))["MLP: output error"]
    assert list(values(plot)) == ["uncompensated", "compensated", "floor"]


@pytest.mark.parametrize("value", ["0.5", True, [1.0], float("nan"), float("inf"), 10**400, -1e301])
def test_what_is_no_finite_number_is_missing(value):
    assert values(figures_of(site(0, rho2=value), site(1))["ρ²: what the kept units predict"]) == {"MLP": {1: 0.75}}


def test_one_plot_of_rho2_with_a_line_per_space():
    plot = figures_of(site(0, "qk", rho2=0.1), site(0, "heads", rho2=0.2), site(0, "mlp", rho2=0.3))
    plot = plot["ρ²: what the kept units predict"]
    assert values(plot) == {"MLP": {0: 0.3}, "Attention heads": {0: 0.2}, "Q/K": {0: 0.1}}
    assert plot.full == (0, 1)
    assert len({line.style for line in plot.series}) == 3


def test_heads_are_a_mean_and_a_spread():
    found = figures_of(site(2, "qk", heads=heads((0.5, 0.1), (0.2, 0.3), (0.8, 0.2))))["Q/K: logit error per head"]
    before, after = (line.points[0] for line in found.series)
    assert (before.place, before.low, before.high) == (2, 0.2, 0.8)
    assert (before.value, after.value) == (pytest.approx(0.5), pytest.approx(0.2))
    assert before.text == "mean 0.500, from 0.200 (head 1) to 0.800 (head 2)"
    assert after.text == "mean 0.200, from 0.100 (head 0) to 0.300 (head 1)"


def test_heads_that_were_not_measured_are_left_out():
    some = heads((0.5, 0.1), (0.2, 0.3))
    some[0]["error_compensated"] = None
    before, after = figures_of(site(0, "qk", heads=some))["Q/K: logit error per head"].series
    assert (before.points[0].low, before.points[0].high) == (0.2, 0.5)
    assert after.points[0].text == "0.300"
    assert "ρ² per head" not in figures_of(site(0, "qk", heads=some))


def test_ranks_are_shares_of_the_width():
    found = figures_of(site(0, effective_rank=2.0, k95=4), site(0, "heads", effective_rank=3.0, k95=6, width=12))
    assert values(found["MLP: rank of the inputs"]) == {"effective rank": {0: 0.25}, "k95": {0: 0.5}}
    assert values(found["Attention heads: rank of the inputs"]) == {"effective rank": {0: 0.25}, "k95": {0: 0.5}}


def test_ranks_of_heads_of_unknown_width_are_not_shown():
    assert "Attention heads: rank of the inputs" not in figures_of(site(0, "heads"))


def test_units_are_shown_only_where_blocks_differ():
    assert "Units kept" not in figures_of(site(0), site(1), site(0, "heads", kept=[1]))
    found = figures_of(site(0), site(1, kept=[0, 1]), site(0, "heads", kept=[1]))
    assert values(found["Units kept"]) == {"MLP": {0: 0.5, 1: 0.25}, "Attention heads": {0: 0.125}}


def test_nothing_measured_gives_no_plot():
    assert figures_of(bare(0), bare(1)) == {}
    assert figures_of() == {}


def test_a_space_of_a_later_version_is_shown_by_its_name():
    plot = figures_of(site(0, "experts"))["experts: output error"]
    assert list(values(plot)) == ["uncompensated", "compensated", "held out", "floor"]


def test_a_plot_is_one_entry():
    style = Style("after", "square")
    new = Plot("Norm", "Higher is better.", "norm", (Line("after", style, figure("norm")),), (0, 1), of="layers")
    own = Plot("{space}: spread", "", "", (Line("a", style, figure("new")), Line("b", style, figure("k95"))))
    layers = [RecoveredLayer.read(layer(b, norm=v)) for b, v in enumerate((0.9, None, 0.8))]
    found = figures([SiteRecord.read(site(0, new=3))], layers, plots=(new, own))
    assert [(f.title, values(f)) for f in found] == [
        ("Norm", {"after": {0: 0.9, 2: 0.8}}),
        ("MLP: spread", {"a": {0: 3.0}, "b": {0: 4.0}}),
    ]


def masked(linears: list[Json], rotations: list[Json] | None = None) -> dict[str, Figure]:
    found = figures([], (), [MaskedLinear.read(v) for v in linears], [Learned.read(v) for v in rotations or []])
    return {f.title: f for f in found}


LLAMA = [
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def test_errors_of_linears_have_a_line_per_kind():
    errors = {(b, m): 0.01 * (10 * b + i) for b in range(3) for i, m in enumerate(LLAMA)}
    plot = masked([linear(b, m, error=e) for (b, m), e in reversed(errors.items())][::-1])[
        "Output error of the linears"
    ]
    assert values(plot) == {
        kind: {b: errors[b, m] for b in range(3)}
        for kind, m in zip(("q", "k", "v", "o", "gate", "up", "down"), LLAMA, strict=True)
    }
    assert list(values(plot)) == list(KINDS)
    assert [line.style for line in plot.series] == [space.style for space in KINDS.values()]
    assert (plot.unit, plot.full, plot.log) == ("share of output energy", None, True)


def test_the_order_of_kinds_does_not_depend_on_the_report():
    plot = masked([linear(0, m) for m in LLAMA[::-1]])["Output error of the linears"]
    assert list(values(plot)) == list(KINDS)


def test_linears_without_an_error_are_gaps():
    linears = [linear(0), linear(1, error=None), linear(2), linear(0, "mlp.up_proj", error=None)]
    assert values(masked(linears)["Output error of the linears"]) == {"q": {0: 0.25, 2: 0.25}}
    assert masked([linear(b, error=None) for b in range(2)]) == {}


def families() -> list[tuple[str, str | None]]:
    return [(name, variant) for name in known_families() for variant in (None, *variants_of(name))]


@pytest.mark.parametrize(("name", "variant"), families())
def test_every_linear_of_every_family_has_a_kind_of_its_own(name, variant):
    family = load_family(name, variant)
    assert set(family.labels) == set(family.linears)
    shared = {module for name, space in family.consumers.items() if name == "shared" for module in space.modules}
    found = [label for module, label in family.labels.items() if module not in shared]
    assert set(found) <= set(KINDS)
    assert len(set(found)) == len(found)
    attention = family.attention
    apart = "qkvo" if len({attention.query, attention.key, attention.value}) == 3 else "qo"
    if attention.latent:
        apart = ""
    assert set(apart) <= set(found)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        ("model.layers.11.self_attn.v_proj.weight", "self_attn.v_proj"),
        ("layers.11.mlp.down_proj.weight", "mlp.down_proj"),
        ("model.decoder.layers.11.fc1.weight", "fc1"),
        ("model.layers.11.mlp.experts.11.up_proj.weight", "mlp.experts.11.up_proj"),
        ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.v_proj"),
        ("", ""),
    ],
)
def test_a_linear_without_a_kind_has_the_name_of_its_module(weight, kind):
    """Reports of before there was one."""
    found = linear(11, weight=weight)
    assert kind_of(MaskedLinear.read(found | {"kind": None})) == kind
    del found["kind"]
    assert kind_of(MaskedLinear.read(found)) == kind
    assert kind_of(MaskedLinear.read(found | {"kind": "gate"})) == "gate"


def test_a_kind_of_a_later_version_is_shown_by_its_name():
    plot = masked([linear(0), linear(0, "mixer.in_proj", error=0.5)])["Output error of the linears"]
    assert values(plot) == {"q": {0: 0.25}, "mixer.in_proj": {0: 0.5}}


def test_entropy_before_and_after_with_the_steps_taken():
    plot = masked([], [learned(0, 50.0, 30.5, 20), learned(1, 60.0, 40.0, 1)])["Entropy of the importance"]
    assert values(plot) == {"before rotation": {0: 50.0, 1: 60.0}, "after rotation": {0: 30.5, 1: 40.0}}
    before, after = plot.series
    assert [p.text for p in before.points] == ["50", "60"]
    assert [p.text for p in after.points] == ["30.5, 20 steps", "40, 1 step"]
    assert (plot.unit, plot.log) == ("nats", False)


def test_unknown_steps_are_not_spoken_of():
    entry = learned(0) | {"steps": None}
    assert masked([], [entry])["Entropy of the importance"].series[1].points[0].text == "30"


def test_a_shared_rotation_has_no_place_over_depth():
    assert masked([], [learned(None)]) == {}


def recovered(*layers: Json, perplexities: list[Json] | None = None) -> dict[str, Figure]:
    found = figures(
        [],
        [RecoveredLayer.read(entry) for entry in layers],
        perplexities=[Perplexity.read(entry) for entry in perplexities or []],
    )
    return {f.title: f for f in found}


def test_hidden_states_before_and_after_recovery():
    found = recovered(layer(0), layer(1, mse_before=2.0, mse_start=1.0, mse_after=0.1, cka_before=0.5, cka_after=0.9))
    error, cka = found.values()
    assert (error.title, error.unit, error.full, error.log) == (
        "Error of the hidden states",
        "mean squared error",
        None,
        True,
    )
    assert values(error) == {
        "before recovery": {0: 0.5, 1: 2.0},
        "start": {0: 0.4, 1: 1.0},
        "after recovery": {0: 0.25, 1: 0.1},
    }
    assert (cka.title, cka.unit, cka.full) == ("Linear CKA of the hidden states", "linear CKA", (0, 1))
    assert values(cka) == {"before recovery": {0: 0.75, 1: 0.5}, "after recovery": {0: 0.875, 1: 0.9}}
    assert [(plot.across, plot.joined) for plot in (error, cka)] == [("block", False)] * 2


def test_blocks_without_a_figure_are_gaps():
    found = recovered(layer(0), layer(1, mse_after=None, cka_before=float("nan")), layer(2))
    assert values(found["Error of the hidden states"])["after recovery"] == {0: 0.25, 2: 0.25}
    assert values(found["Error of the hidden states"])["start"] == {0: 0.4, 1: 0.4, 2: 0.4}
    assert values(found["Linear CKA of the hidden states"])["before recovery"] == {0: 0.75, 2: 0.75}
    assert recovered({k: v for k, v in layer(0).items() if "mse" not in k and "cka" not in k}) == {}


OUTCOMES = [
    (layer(0), "weights of epoch 9", ""),
    (kept(0), "old weights kept", ", old weights kept"),
    (
        layer(0, diverged=True),
        "training diverged, weights of epoch 9",
        ", training diverged, weights of epoch 9",
    ),
    (kept(0, diverged=True), "training diverged, old weights kept", ", training diverged, old weights kept"),
]


@pytest.mark.parametrize(("entry", "became", "remark"), OUTCOMES)
def test_what_became_of_a_block(entry, became, remark):
    """In words; beside its value only where it is not what recovery is for."""
    assert outcome(RecoveredLayer.read(entry)) == became
    told = [[line.points[0].text for line in plot.series] for plot in recovered(entry).values()]
    assert told == [["0.500", "0.400", f"0.250{remark}"], ["0.750", f"0.875{remark}"]]


def test_perplexity_is_over_how_many_blocks_were_recovered():
    entries = [{"blocks": b, "perplexity": p} for b, p in ((0, 12.5), (2, None), (4, 11.0))]
    (plot,) = recovered(perplexities=entries).values()
    assert plot.title == "Perplexity over recovered blocks"
    assert values(plot) == {"perplexity": {0: 12.5, 4: 11.0}}
    assert (plot.unit, plot.across, plot.joined) == ("perplexity", "blocks recovered", True)


def test_every_plot_says_what_better_is():
    assert all(
        p.note.startswith(("Lower", "Higher", "Where the budget went", "Where the ranks went")) and p.unit
        for p in PLOTS
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.0, "0"), (4.0, "4"), (1536.0, "1,536"), (0.25, "0.250"), (0.123456, "0.123"), (186.4, "186")],
        (float("inf"), "inf"),
        *[(12.34, "12.3"), (0.0001, "0.000100"), (0.0000123, "1.23e-05"), (2e9, "2.00e+09"), (-0.5, "-0.500")],
    ],
)
def test_numbers(value, text):
    assert shown(value) == text
