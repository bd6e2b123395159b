import json
from fractions import Fraction

import pytest
import yaml
from pydantic import ValidationError

from ckpt_prune.common.yaml12 import Yaml12Loader
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.recipe.sizes import Size, TargetSize, cost_in, parse_size, small_share_line

NONE = "Value error, a target size has exactly one of params, bytes, flops and latency: {params: 5.0B}"
COST = Cost(parameters=6_738_415_616, bytes=13_476_831_232, flops=28_000_000_000_001, tokens=2048)
ALLOWED = {
    "params": "5.0B (K, M, B or T), 5000000000",
    "bytes": "9.5GB or 9.5G (KB to PB), 9.5GiB (KiB to PiB), 10000000000",
    "flops": "2.3T (K, M, G, T or P, with or without FLOPs), 2300000000000",
}
WHAT = {"params": "parameters", "bytes": "bytes", "flops": "FLOPs"}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("params", "5.0B", 5_000_000_000),
        ("params", "125 M", 125_000_000),
        ("params", "300K", 300_000),
        ("params", "1.5T", 1_500_000_000_000),
        ("params", "5000000000", 5_000_000_000),
        ("params", "5_000_000_000", 5_000_000_000),
        ("params", "5,000,000,000", 5_000_000_000),
        ("params", " 5 000 000 000 ", 5_000_000_000),
        ("params", "5e9", 5_000_000_000),
        ("params", "6.738415616B", 6_738_415_616),
        ("params", "1.2349K", 1234),
        ("params", "0.001K", 1),
        ("bytes", "10GB", 10_000_000_000),
        ("bytes", "80M", 80_000_000),
        ("bytes", "2g", 2_000_000_000),
        ("bytes", "500 K", 500_000),
        ("bytes", "0.5KB", 500),
        ("bytes", "1000", 1000),
        ("params", "80M", 80_000_000),
        ("bytes", "9.5GiB", 10_200_547_328),
        ("bytes", "9.5gib", 10_200_547_328),
        ("bytes", "1TiB", 2**40),
        ("bytes", "1PB", 10**15),
        ("bytes", "1PiB", 2**50),
        ("bytes", "13476831232", 13_476_831_232),
        ("bytes", "13,476,831,232 B", 13_476_831_232),
        ("bytes", "12.6 GiB", 13_529_146_982),  # 13529146982.4
        ("flops", "2.3T", 2_300_000_000_000),
        ("flops", "850G", 850_000_000_000),
        ("flops", "850 gflop", 850_000_000_000),
        ("flops", "850 FLOPS", 850),
        ("flops", "7P", 7 * 10**15),
    ],
)
def test_numbers(kind, text, value):
    assert parse_size(kind, text) == Size(value=value)
    assert parse_size(kind, text).of(3) == value


@pytest.mark.parametrize("kind", ["params", "bytes", "flops"])
@pytest.mark.parametrize(
    ("text", "share"),
    [("50%", Fraction(1, 2)), ("33.3 %", Fraction(333, 1000)), ("100%", Fraction(1)), ("1e-0%", None), ("1e1%", 0.1)],
)
def test_shares(kind, text, share):
    if share is None:
        with pytest.raises(ValueError, match="is not a size in"):
            parse_size(kind, text)
    else:
        assert parse_size(kind, text) == Size(share=Fraction(str(share)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("params", ""),
        ("params", "-5B"),
        ("params", "5G"),
        ("params", "nan"),
        ("params", "5e-3B"),
        ("params", "5e999"),
        ("params", "5000,000"),
        ("params", "5,000_000"),
        ("params", "5,000B"),
        ("params", "5.000.000"),
        ("params", "5,000%"),
        ("params", "٥B"),
        ("params", "9" * 31),
        ("bytes", "10Gi"),
        ("bytes", "9,5GiB"),
        ("flops", "2.3B"),
        ("flops", "2.3 T FLOPs"),
    ],
)
def test_what_is_no_size_is_told_what_is(kind, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_size(kind, text)
    assert str(caught.value) == (
        f"{text!r} is not a size in {WHAT[kind]}: allowed are {ALLOWED[kind]}, or a share of the dense model: 50%"
    )


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("params", "0", "'0' comes to less than 1: nothing of the model would be left"),
        ("params", "0.0009K", "'0.0009K' comes to less than 1: nothing of the model would be left"),
        ("latency", "0ms@token", "'0ms' comes to less than 1ns: no model runs in so short a time"),
        (
            "latency",
            "0.3",
            "'0.3' is not a time: allowed are 12ms (ns, us, ms or s), or a share of the dense model: 50%",
        ),
        ("params", "0.7", "'0.7' is no size in parameters: did you mean 70%, a share of the dense model?"),
        ("bytes", "0.125", "'0.125' is no size in bytes: did you mean 12.5%, a share of the dense model?"),
        ("bytes", "70", "'70' is 70 bytes: did you mean 70MB or 70%, a share of the dense model?"),
        ("bytes", "999 B", "'999 B' is 999 bytes: did you mean 999MB?"),
        ("flops", "0%", "'0%' is not a share of the dense model: above 0% and at most 100% is allowed"),
        ("params", "100.1%", "'100.1%' is not a share of the dense model: above 0% and at most 100% is allowed"),
        (
            "params",
            "5.5",
            "'5.5' is no whole number of parameters: is a suffix missing? Allowed are 5.0B (K, M, B or T), 5000000000, "
            "or a share of the dense model: 50%",
        ),
    ],
)
def test_sizes_that_mean_nothing(kind, text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_size(kind, text)
    assert str(caught.value) == message


@pytest.mark.parametrize("fields", [{}, {"value": 1, "share": Fraction(1, 2)}])
def test_a_size_is_a_number_or_a_share(fields):
    with pytest.raises(ValueError, match=r"^a size is either a number or a share$"):
        Size(**fields)


@pytest.mark.parametrize(
    ("written", "kind", "text", "value"),
    [
        ("{params: 5.0B}", "params", "5.0B", 5_000_000_000),
        ("{params: 5000000000}", "params", "5000000000", 5_000_000_000),
        ("{params: 5e9}", "params", "5000000000", 5_000_000_000),
        ("{params: 5_000_000_000}", "params", "5_000_000_000", 5_000_000_000),
        ("{bytes: ' 9.5GiB '}", "bytes", "9.5GiB", 10_200_547_328),
        ("{flops: 2.3 TFLOPs}", "flops", "2.3 TFLOPs", 2_300_000_000_000),
        ("{params: 50%}", "params", "50%", 3_369_207_808),
        ("{flops: 50%}", "flops", "50%", 14_000_000_000_000),
    ],
)
def test_a_target_in_a_recipe(written, kind, text, value):
    target = TargetSize.model_validate(yaml.load(written, Yaml12Loader))
    assert (target.kind, target.text, target.of(cost_in(target.kind, COST))) == (kind, text, value)
    assert target.model_dump() == target.model_dump(mode="json") == {kind: text}
    assert json.loads(target.model_dump_json()) == {kind: text}
    assert TargetSize.model_validate(target.model_dump()) == target
    assert TargetSize.model_validate_json(target.model_dump_json()) == target


@pytest.mark.parametrize(
    ("values", "place", "message"),
    [
        ({}, (), NONE),
        ({"params": None}, (), NONE),
        ({"params": "5B", "bytes": "9GB"}, (), NONE),
        ({"parameters": "5B"}, ("parameters",), "Extra inputs are not permitted"),
        ({"params": True}, ("params",), "Input should be a valid string"),
        (
            {"bytes": "10Gi"},
            ("bytes",),
            "Value error, '10Gi' is not a size in bytes: allowed are 9.5GB or 9.5G (KB to PB), 9.5GiB (KiB to PiB), "
            "10000000000, or a share of the dense model: 50%",
        ),
        (
            {"flops": float("inf")},
            ("flops",),
            "Value error, 'inf' is not a size in FLOPs: allowed are 2.3T (K, M, G, T or P, with or without FLOPs), "
            "2300000000000, or a share of the dense model: 50%",
        ),
    ],
)
def test_a_target_that_is_none_is_refused(values, place, message):
    with pytest.raises(ValidationError) as caught:
        TargetSize.model_validate(values)
    (first,) = caught.value.errors()
    assert (first["loc"], first["msg"]) == (place, message)


@pytest.mark.parametrize(
    ("kind", "text", "suggestion"),
    [
        ("params", "30%", "keeps 30% of the parameters; to make it 30% smaller say 70%"),
        ("bytes", "33.5 %", "keeps 33.5 % of the bytes; to make it 33.5 % smaller say 66.5%"),
        ("latency", "20%@512", "keeps 20% of the latency; to make it 20% shorter say 80%@512"),
        ("params", "50%", None),
        ("params", "5M", None),
        ("params", None, None),
    ],
)
def test_a_share_of_less_than_half_may_have_been_meant_as_what_goes(kind, text, suggestion):
    sizes = {"flops": None, kind: text}
    assert small_share_line(sizes) == (suggestion and f"--target-{kind} {text} {suggestion}")
