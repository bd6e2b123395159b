"""What a job will take: the arithmetic, against counts made by hand and by torch itself; and when it is said."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.logits import LogitMoments
from ckpt_prune.calibration.samples import TokenWindows
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.job.prepared import RecoverySamples
from ckpt_prune.machine import Rates
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.runner.estimate import estimate as module
from ckpt_prune.runner.estimate.estimate import Stage, estimate, is_long, of_calibration, of_job, of_prune
from ckpt_prune.runner.estimate.work import (
    BACK,
    Heads,
    Shape,
    Site,
    Work,
    factored,
    held_out,
    inner_moments,
    moments,
    ranked,
    refitted,
    tried,
)
from ckpt_prune.runner.settle import foresee, settle
from ckpt_prune.stages.spaces.effects.site_variants import POINTS, dropped_counts
from tests import encoders, families
from tests.families import BLOCKS, request_on, windows

VARIANT = "llama-gqa-tied"
KINDS = [field.name for field in dataclasses.fields(Work)]
ONE = Rates(*(1.0,) * 11, resident=0)
SITE = Site(outputs=6, inputs=10, kept=7, units=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make(tmp_path_factory.mktemp("estimate") / VARIANT, VARIANT)


# ---- work and rates ----------------------------------------------------------------------------------------------


def test_work_has_a_rate_for_every_kind():
    assert [*KINDS, "resident"] == [field.name for field in dataclasses.fields(Rates)]


@pytest.mark.parametrize("kind", KINDS)
def test_time_is_work_over_its_rate(kind):
    rates = dataclasses.replace(ONE, **{kind: 4.0})
    assert Work(**{kind: 12}).seconds(rates) == 3
    assert (Work(**{kind: 12}) + Work(**{kind: 2}) * 2).seconds(rates) == 4


def test_both_of_two_kinds_take_their_time():
    assert (Work(gemm=3) + Work(disk=4)).seconds(ONE) == 7
    assert Work().seconds(ONE) == 0


def test_stages_of_one_name_are_one_and_the_largest_memory_counts():
    stages = [Stage("a", Work(gemm=3), 10), Stage("b", Work(wide=4), 30), Stage("a", Work(gemm=5), 20)]
    told = estimate(stages, 7, dataclasses.replace(ONE, resident=100))
    assert told.seconds == {"a": 8, "b": 4}
    assert (told.peak_bytes, told.disk_bytes) == (100 + module.LIBRARIES + 30, 7)
    assert told.data() == {
        "seconds": 12.0,
        "peak_bytes": told.peak_bytes,
        "disk_bytes": 7,
        "stages": {"a": 8.0, "b": 4.0},
    }


# ---- FLOPs -------------------------------------------------------------------------------------------------------


def counted(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_a_run_of_a_block_has_the_flops_that_torch_counts(folder):
    model = Model.open(folder)
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    stream = HiddenStream(factory, model.checkpoint.tensors, model.checkpoint.read, TokenWindows(windows(5, 16)))
    block = factory.block(0, model.read_block(0))
    # A fused attention is not counted by torch.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        found = counted(lambda: stream.run(block, 0, stream.states))
    assert Shape.of(model).run(5, 16).gemm == found


def test_moments_have_the_flops_of_their_gram():
    x, gram = torch.randn(9, 10), torch.zeros(10, 10)
    assert moments(9, 10, gram=True).grams == counted(lambda: torch.addmm(gram, x.T, x))
    assert moments(9, 10, gram=False).grams == moments(9, 10, gram=True).gemm == 0


def test_closed_forms_grow_with_the_cube_of_the_width():
    wide = Site(*(2 * each for each in (SITE.outputs, SITE.inputs, SITE.kept)), units=SITE.units)
    for form in (ranked, factored, refitted, lambda site: tried(site, 3), lambda site: held_out(site, 10, 5)):
        small, large = form(SITE), form(wide)
        for kind in ("wide", "factor", "eigen"):
            assert getattr(large, kind) == pytest.approx(8 * getattr(small, kind))


# ---- jobs --------------------------------------------------------------------------------------------------------


def seconds_of(stages: list[Stage]) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for stage in stages:
        found[stage.name] = found.get(stage.name, Work()) + stage.work
    return found


def test_calibrating_takes_as_much_more_as_there_are_more_samples(folder):
    model = Model.open(folder)
    once, thrice = (
        seconds_of(of_calibration(model, count, 16, ("moments", "gram", "taylor"), 1))
        for count in (4096 // 16, 3 * 4096 // 16)
    )
    for stage in ("measuring", "gradients"):
        assert thrice[stage].gemm == pytest.approx(3 * once[stage].gemm)
    bare = seconds_of(of_calibration(model, 256, 16, ("moments",), 1))["measuring"]
    shape = Shape.of(model)
    assert bare.gemm == BLOCKS * shape.run(256, 16).gemm
    grams = sum(2 * 256 * 16 * site.inputs**2 for site in shape.sites.values())
    assert (once["measuring"].gemm, once["measuring"].grams) == (bare.gemm, BLOCKS * grams)


def test_scales_take_so_many_runs_of_all_blocks(folder):
    """The dense model runs once; of each step it is forward, forward again, and back for inputs and for weights."""
    model, samples = Model.open(folder), TokenWindows(windows(10, 16))
    shape = Shape.of(model)

    def stage(epochs: int) -> Work:
        recipe = load_recipe("ridge", (f"recovery={{method: scales, epochs: {epochs}, held_out: 0.2}}",), 0.3)
        training = RecoverySamples(samples, torch.float32)
        settled = settle(request_on(folder, recipe, live=windows(8, 16), training=training))
        stages, _ = of_prune(settled)
        assert [stage.name for stage in stages] == ["blocks", "rest", "scales"]
        stays = settled.output.cost.parameters / settled.before.parameters
        return stages[-1].work, stays

    (one, stays), (two, _) = stage(1), stage(2)
    run, head = shape.run(1, 16).gemm * BLOCKS, shape.logits(16).gemm
    assert two.gemm - one.gemm == pytest.approx(
        8 * ((3 + BACK) * stays * run + 4 * head) + 2 * (stays * run + 2 * head)
    )
    assert 2 * one.gemm - two.gemm == pytest.approx(10 * run + 2 * (stays * run + 2 * head))


def test_gradients_are_of_a_few_samples_only(folder):
    model = Model.open(folder)
    few, many = (
        seconds_of(of_calibration(model, count, 16, ("moments", "gram", "fisher"), 1))["gradients"] for count in (8, 80)
    )
    assert few == many


def test_a_sequential_recipe_runs_every_block_for_each_space_and_once_more(folder):
    request = request_on(folder, load_recipe("ridge"), live=windows(8, 16))
    (blocks, rest), disk = of_prune(settle(request))
    assert (blocks.name, rest.name) == ("blocks", "rest")
    shape = Shape.of(Model.open(folder))
    grams = sum(2 * 8 * 16 * site.inputs**2 for site in shape.sites.values())
    assert (blocks.work.gemm, blocks.work.grams) == (BLOCKS * 3 * shape.run(8, 16).gemm, BLOCKS * grams)
    assert disk == settle(request).output.cost.bytes


@pytest.mark.parametrize(("heads", "runs"), [(None, 3.0), (0.25, 3.6)])
def test_a_block_is_run_for_a_site_before_the_last_only_where_there_is_one(folder, heads, runs):
    """By a recipe that corrects drift: the dense block, the pruned one for its last site, and to go on."""
    wanted = families.recipe("ridge", heads=heads, lam=0.1, target="drift")
    request = request_on(folder, wanted, live=windows(8, 16))
    blocks = of_prune(settle(request))[0][0]
    shape = Shape.of(Model.open(folder))
    sites = [shape.sites[space] for space in wanted.spaces]
    grams = sum(2 * 8 * 16 * site.inputs**2 for site in sites)
    drift = sum(2 * 8 * 16 * site.inputs * site.outputs for site in sites)
    assert blocks.work.gemm == pytest.approx(BLOCKS * runs * shape.run(8, 16).gemm)
    assert (blocks.work.grams, blocks.work.single) == (BLOCKS * grams, BLOCKS * drift)


def test_a_dense_recipe_measures_first_and_then_runs_nothing(folder, tmp_path):
    live = settle(request_on(folder, load_recipe("flap"), live=windows(8, 16)))
    found = {stage.name: stage.work for stage in of_prune(live)[0]}
    assert list(found) == ["measuring", "blocks", "rest"]
    assert found["measuring"].gemm > 0
    assert found["blocks"].gemm == 0
    cached = families.calibrate(folder, tmp_path / "stats", windows(8, 16))
    told = [stage.name for stage in of_prune(settle(request_on(folder, load_recipe("flap"), cached)))[0]]
    assert told == ["blocks", "rest"]


def test_what_best_measures_is_counted(folder):
    request = request_on(folder, load_recipe("best"), live=windows(8, 16), folds=4)
    stages, disk = of_prune(foresee(request))
    found = {stage.name: stage.work for stage in stages}
    assert list(found) == ["measuring", "gradients", "effects", "ranking", "blocks", "rest"]
    assert found["blocks"].eigen > 0
    assert found["ranking"].factor > 0
    assert disk > foresee(request).output.cost.bytes
    # A dry run names no samples: the default number is meant.
    default = of_prune(foresee(request_on(folder, load_recipe("best"))))[0]
    assert default[0].work.gemm > found["measuring"].gemm


def test_spaces_inside_heads_are_counted_beside_the_consumers_they_share(folder):
    """Consumers are measured once, whatever stands on them; what is tried out of a space is counted by its scores."""

    def told(name: str) -> dict[str, Work]:
        request = request_on(folder, load_recipe(name), live=windows(8, 16), folds=4)
        return {stage.name: stage.work for stage in of_prune(foresee(request))[0]}

    plain, attention = told("best"), told("best-attention")
    assert list(attention) == list(plain)
    assert attention["measuring"].grams == plain["measuring"].grams
    model = Model.open(folder)
    shape = Shape.of(model, dict.fromkeys(("queries", "values", "rotary"), 1))
    pairs = BLOCKS * inner_moments(shape.inner["rotary"], 8, 16).single
    assert attention["measuring"].single - plain["measuring"].single == pairs
    assert attention["gradients"].grams == plain["gradients"].grams

    def tried_out(space: str, scores: int) -> int:
        site, points = shape.sites[space], len(dropped_counts(model.units(space), POINTS))
        return 2 * 2 * 16 * scores * points * site.outputs * site.inputs  # of two samples of the last fold

    more = tried_out("queries", 3) + tried_out("values", 1)
    assert attention["gradients"].single - plain["gradients"].single == BLOCKS * more
    for name in ("gradients", "effects", "ranking", "blocks"):
        assert attention[name].wide > plain[name].wide, name


@pytest.mark.parametrize("recipe", ["values", "rotary"])
def test_of_spaces_inside_heads_alone_there_is_an_estimate(folder, recipe):
    settled = settle(request_on(folder, load_recipe(recipe), live=windows(8, 16)))
    (blocks, _), disk = of_prune(settled)
    assert blocks.work.gemm == BLOCKS * 2 * Shape.of(Model.open(folder)).run(8, 16).gemm
    assert disk == settled.output.cost.bytes


def test_dimensions_of_queries_and_keys_are_counted(tmp_path):
    """Where no rotation stands between them."""
    bert = encoders.make(tmp_path / "bert", "bert-mlm")
    cached = encoders.calibrate(bert, tmp_path / "stats", encoders.samples("bert-mlm"), collect=encoders.FOR_CORP)
    qk = Shape.of(Model.open(bert), {"qk": 3}).inner["qk"]
    assert (qk.kept, qk.groups) == (3, 0)
    wide = {}
    for method in ("none", "logit"):
        recipe = encoders.recipe({"qk": 0.25}, methods={"qk": method})
        wide[method] = of_prune(settle(encoders.request_on(bert, recipe, cached)))[0][0].work.wide
    assert wide["logit"] > wide["none"]


def test_products_of_queries_and_keys_have_the_flops_that_torch_counts():
    heads = Heads(heads=3, groups=0, width=4, units=4, kept=2)
    states = torch.randn(5, 16, 12)
    empty = LogitMoments.zeros(3, 4, form="per-sample")
    assert inner_moments(heads, 5, 16).single == counted(lambda: empty.accumulate(states, states))


def test_what_is_tried_of_blocks_and_dimensions_is_counted(folder):
    """Beside what the same recipe without them takes, of which the unpruned model is measured once."""

    def told(recipe):
        request = request_on(folder, recipe, live=windows(8, 16), folds=4)
        return {stage.name: stage.work for stage in of_prune(foresee(request))[0]}

    plain, narrow, axes = (told(load_recipe(name)) for name in ("best-uniform", "best-narrow", "best-axes"))
    assert list(plain) == ["measuring", "gradients", "effects", "ranking", "blocks", "rest"]
    assert list(narrow) == ["hidden", *plain]
    assert list(axes) == ["depth", "hidden", *plain]
    assert {name: axes[name] for name in plain if name != "rest"} == {n: plain[n] for n in plain if n != "rest"}


@pytest.mark.parametrize("recipe", ["wanda-50", "laco-flap", "ridge-perplexity", "denoise-rotator-wanda-50"])
def test_of_what_is_not_counted_there_is_no_estimate(folder, recipe):
    request = request_on(folder, load_recipe(recipe), live=windows(8, 16))
    changed = foresee(request)
    assert of_prune(changed) is None
    assert of_job(changed) is None


def test_a_plan_has_made_every_choice(folder, tmp_path):
    from ckpt_prune.runner.estimate.estimate import of_plan
    from ckpt_prune.runner.plan import make_plan

    cached = families.calibrate(folder, tmp_path / "stats", windows(8, 16), folds=4)
    own = settle(request_on(folder, load_recipe("ridge-folds"), cached))
    assert of_plan(own, make_plan(own)).seconds["blocks"] < of_job(own).seconds["blocks"]


# ---- when it is said ---------------------------------------------------------------------------------------------


def test_short_jobs_are_not_worth_a_measurement(folder, monkeypatch):
    monkeypatch.setattr(module.machine, "measured_rates", lambda *_: pytest.fail("measured"))
    assert module.forewarning(settle(request_on(folder, load_recipe("ridge"), live=windows(8, 16)))) is None


@pytest.mark.parametrize(("speed", "said"), [(1.0, True), (1e6, False)])
def test_long_ones_are_told_of_where_the_machine_is_slow(folder, monkeypatch, speed, said):
    slow = Rates(*(1e4 * speed,) * 7, reduced=1e4 * speed, calls=1e6, disk=1e8, hashed=1e9, resident=2**30)
    monkeypatch.setattr(module.machine, "measured_rates", lambda *_: slow)
    monkeypatch.setattr(module, "_SLOW", dataclasses.replace(slow, calls=1.0))
    settled = settle(request_on(folder, load_recipe("ridge"), live=windows(8, 16)))
    assert is_long(of_prune(settled)[0])
    line = module.forewarning(settled)
    assert (line is not None) == said
    if line is not None:
        assert line.startswith("this takes about ")
        assert line.endswith(" of disk, where nothing else runs on this machine")


def test_the_estimate_can_be_read_back(folder):
    told = of_job(settle(request_on(folder, load_recipe("ridge"), live=windows(8, 16))))
    assert json.loads(json.dumps(told.data())) == told.data()
