"""A few of the cases that `tools/fuzz.py` tries by the thousand, and what it found."""

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.cli.main import main
from ckpt_prune.common.errors import UserError
from ckpt_prune.stages import FullRecipe
from tests.forked import posix
from tests.fuzz.mutate import mutate_data
from tests.fuzz.run import batch, case_bytes
from tests.fuzz.targets import GRAPHS, RECIPE, TARGETS
from tests.pairs import every

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
few = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@posix
@pytest.mark.parametrize("target", every(4, sorted(TARGETS.keys() - GRAPHS)))
def test_changed_files_are_a_line_or_nothing(place: Path, target: str) -> None:
    before = (place / TARGETS[target].file).read_bytes()
    assert batch(place, target, 7, 0, 5) == []
    assert (place / TARGETS[target].file).read_bytes() == before


@posix
def test_the_machine_sees_what_does_not_hold(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_prune.cli.inspect_command.command.function", lambda *_, **__: 1 / 0)
    [failure] = batch(place, "config", 7, 0, 1)
    assert failure.what.startswith("raises ZeroDivisionError at ")
    assert (failure.target, failure.number, failure.command) == ("config", 0, "inspect dense")


@posix
@pytest.mark.parametrize(
    ("change", "command", "message"),
    [
        ({"ckpt_prune_blocks": {"layers": "model.layodel"}}, "verify", "transformers refuses this config.json: "),
        ({"hidden_act": "sihu"}, "verify", "transformers refuses this config.json: "),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": [1]}},
            "export",
            "rope_theta '[1]': it is a number",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}},
            "export",
            "hold its rope.freq_base 1e+300",
        ),
        ({"max_position_embeddings": 2**40}, "export", "a GGUF file cannot hold its context_length 1099511627776"),
    ],
)
def test_a_config_of_own_code_that_cannot_be_is_a_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], command: str, message: str
) -> None:
    monkeypatch.chdir(place)
    original = (place / "own" / "config.json").read_text()
    (place / "own" / "config.json").write_text(json.dumps(json.loads(original) | change))
    try:
        given = ("own", "--format", "gguf", "--no-validate", "-o", "out.gguf") if command == "export" else ("own",)
        result = CliRunner().invoke(main, [command, *given])
        assert result.exit_code == (1 if command == "verify" else 2)
        assert message in result.output
        assert not (place / "out.gguf").exists()
    finally:
        (place / "own" / "config.json").write_text(original)


def test_the_same_seed_makes_the_same_file(place: Path) -> None:
    assert case_bytes(place, "config", 1, 3) == case_bytes(place, "config", 1, 3)
    assert len({case_bytes(place, "config", 1, number) for number in range(30)}) > 20
    rng = random.Random(0)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    assert len({mutate_data(len(header).to_bytes(8, "little") + header, "safetensors", rng) for _ in range(50)}) > 30


@few
@given(value=JSON)
def test_any_json_is_an_object_or_a_value_error(value: object) -> None:
    data = json.dumps(value).encode("utf-8", "surrogatepass")
    with suppress(ValueError):
        assert parse_json_object(data) == value


@few
@given(key=st.sampled_from(["ratio", "spaces", "recovery", "export", "name", "target"]), value=JSON)
def test_any_value_in_a_recipe_is_one_or_is_refused(key: str, value: object) -> None:
    with suppress(ValidationError, UserError):
        assert FullRecipe.model_validate(RECIPE | {key: value}).version == 1


@few
@given(header=JSON, length=st.none() | st.integers(0, 2**64 - 1))
def test_any_header_is_one_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, header: object, length: int | None
) -> None:
    data = json.dumps(header).encode("utf-8", "surrogatepass")
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    path.write_bytes((len(data) if length is None else length).to_bytes(8, "little") + data)
    with suppress(UserError):
        assert read_header(path).file_bytes == path.stat().st_size
