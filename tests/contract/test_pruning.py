"""Every kind of space with every compensation and target, against whole models in float64; what outputs promise."""

import pytest

import ckpt_prune
from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.stages import FullRecipe
from tests.encoders import DEFAULTS
from tests.families import contents
from tests.pairs import first_of_each
from tests.refusals import refusal

from .dense import Dense, spaces_recipe
from .models import ALIKE, LED, LONG, ODD_HEAD, Case, first_cases
from .whole import TARGETS, Target, Whole, assert_same_outputs, outputs

KEPT, COMPUTED = 1e-5, 5e-4
"""Share of the largest output that rounding to float32 may leave: of weights that stay, and of those computed."""


RUNS = 2
"""Of each family, at least; families share out what is paired."""


def like_bert(case: Case) -> bool:
    """Whether it is an encoder that another stands for: one run is enough, without low rank, whose oracle is slow."""
    return case.model_type in ALIKE and not case.family.has_causal


def runs() -> list[tuple[Case, dict[str, str], Target]]:
    """Every class of every family, one where another stands for it; every method with every target in every space."""
    columns, targets = list(METHODS), list(TARGETS)
    turns: list[Case] = []
    alone = [case for case in first_cases() if case.family.experts is not None]
    alone += [LED]
    for first in sorted(first_cases(), key=like_bert):
        if first in alone:
            continue
        group = [case for case in LONG if (case.model_type, case.variant) == (first.model_type, first.variant)] or [
            first
        ]
        turns += [group[index % len(group)] for index in range(max(1 if like_bert(first) else RUNS, len(group)))]
    combinations: list[tuple[Case, dict[str, str], Target]] = []
    for turn, case in enumerate(turns):
        # The second space goes through the methods at another pace than the first, the target turns at each round.
        others = {"heads": columns[turn % len(columns)], "mlp": columns[2 * turn % len(columns)]}
        # Few families have query heads of their own: among them the methods take turns.
        others["queries"] = columns[sum("queries" in methods for _, methods, _ in combinations) % len(columns)]
        others["values"] = columns[(turn // 2) % len(columns)]
        others["pooling"] = "affine"  # 48 samples have as many tokens there: methods without λ are ill-conditioned
        target = targets[(turn + turn // len(columns)) % len(targets)]
        before = [methods.get("qk") for _, methods, other in combinations if other == target]
        # The fewest times with this target. In heads of 8 dimensions low rank has more than one minimum; its oracle
        # takes seconds, and `tests/compensation` has more of it.
        single = case.family.dimension(case.config, "head_dim") < ODD_HEAD
        once = single and not like_bert(case) and "low-rank" not in before
        few = [m for m in reversed(LOGIT_METHODS) if m != "low-rank" or once]
        others["qk"] = min(few, key=before.count)
        # Every family that runs twice has a run of stock blocks, too.
        methods = {space: others[space] for space in (case.values if turn % 2 else case.ratios)}
        combinations.append((case, methods, target))
    # Experts have no biases: their families take turns with the methods that add none.
    bare = [method for method, traits in METHODS.items() if not traits.adds_bias]
    for turn in range(max(len(bare), len(alone) * RUNS)):
        case, method = alone[turn % len(alone)], bare[turn % len(bare)]
        combinations.append((case, dict.fromkeys(case.ratios, method), targets[turn % len(targets)]))
    return combinations


def test_every_method_meets_every_target_in_every_space() -> None:
    met = {(space, method, target) for _, methods, target in runs() for space, method in methods.items()}
    columns = {(space, method, target) for space in ("heads", "mlp") for method in METHODS for target in TARGETS}
    for attention_space in ("queries", "values"):
        assert {method for space, method, _ in met if space == attention_space} == set(METHODS)
    logits = {("qk", method, target) for method in LOGIT_METHODS for target in TARGETS}
    assert {
        combination for combination in met if combination[0] not in ("queries", "values", "dense", "shared", "pooling")
    } == columns | logits


def name(value: object) -> str:
    return "-".join(value.values()) if isinstance(value, dict) else str(value).replace(" ", "-")


def own_kind(cell: tuple[Case, dict[str, str], Target]) -> object:
    """Every family is run every time; its variants and what else methods and targets meet in, with `--thorough`."""
    return cell[0].model_type


@pytest.mark.parametrize(("case", "methods", "target"), first_of_each(runs(), own_kind), ids=name)
def test_equals_a_whole_model_pruned_by_hand(
    dense: Dense, case: Case, methods: dict[str, str], target: Target, tmp_path
) -> None:
    recipe = spaces_recipe(case, methods, **TARGETS[target])
    data = case.samples()
    report = dense.prune(case, recipe, tmp_path / "out", None if target == "dense" else data)
    by_hand = Whole(case).prune(data, methods, target)
    kept = {(site["block"], expert_space(site["space"], site.get("expert"))): site["kept"] for site in report["sites"]}
    assert kept == by_hand.kept
    other = case.samples(6, seed=9)
    assert_same_outputs(outputs(ckpt_prune.load(tmp_path / "out"), other), outputs(by_hand.model, other), COMPUTED)


TOGETHER = "queries and keys are normalised over all heads together, so that every head changes with the others"
ALIBI = "every head adds a bias of its own to its logits (alibi), which its class makes from the number of heads"
TABLE = "every head adds a bias of its own to its logits, from one table for all blocks"
WHOLE = {
    ("olmo2", None): TOGETHER,
    ("olmo3", None): TOGETHER,
    ("olmoe", None): TOGETHER,
    ("bloom", None): ALIBI,
    ("mpt", None): ALIBI,
    ("falcon", "alibi"): ALIBI,
    ("mpnet", None): TABLE,
    ("beit", "use_shared_relative_position_bias"): TABLE,
}
"""Families and variants whose heads all stay, and why."""


@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_a_space_of_which_none_can_go_is_refused(dense: Dense, case: Case) -> None:
    indivisible = {name for name, space in case.family.spaces.items() if space.whole is not None}
    assert indivisible == ({"heads"} if (case.model_type, case.variant) in WHOLE else set())
    described = ckpt_prune.inspect(str(dense.folder(case))).spaces
    assert indivisible == {name for name, space in described.items() if "none" in space.containers.values()}
    for name in indivisible:
        spaces = {name: {**DEFAULTS[name], "optional": False}}
        recipe = FullRecipe.model_validate({"version": 1, "name": "test", "spaces": spaces})
        assert refusal(prepare_plan, dense.request(case, recipe)) == (
            f"recipe test prunes {name}, of which none can go in {case.model_type}: "
            f"{WHOLE[case.model_type, case.variant]}. Leave out spaces.{name}"
        )


@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_stand_ins_compute_the_same_function(dense: Dense, case: Case, tmp_path) -> None:
    """They are offered as containers of the same function."""
    methods = dict.fromkeys(case.ratios, "none")
    other = case.samples(6, seed=9)
    for stand_in in case.family.stand_ins:
        report = dense.prune(case, spaces_recipe(case, methods, stand_in), tmp_path / stand_in)
        assert (report["container"]["model_type"], report["container"]["remote_code"]) == (stand_in, False)
        expected = outputs(Whole(case).prune(case.samples(), methods).model, other)
        assert_same_outputs(outputs(ckpt_prune.load(tmp_path / stand_in), other), expected, KEPT)


@pytest.mark.parametrize("case", LONG[::8], ids=str)
def test_nothing_dropped_is_the_source_byte_for_byte(dense: Dense, case: Case, tmp_path) -> None:
    recipe = spaces_recipe(case, dict.fromkeys(case.ratios, "none"))
    spaces = {space: settings.model_copy(update={"ratio": 0.0}) for space, settings in recipe.spaces.items()}
    dense.prune(case, recipe.model_copy(update={"spaces": spaces}), tmp_path / "out")
    before, after = contents(dense.folder(case)), contents(tmp_path / "out")
    assert before["model.safetensors"] == after["model.safetensors"]
