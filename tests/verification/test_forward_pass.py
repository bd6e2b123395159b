"""A source is compared with transformers' own forward pass before anything is measured or pruned."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.verification import forward_pass
from ckpt_prune.verification.forward_pass import BOUNDS, check_forward
from tests import encoders, families
from tests.cli.running import listing, ok, read_refusal
from tests.contract.dense import Dense
from tests.contract.models import CASES, Case
from tests.pairs import one_of

FOREIGN = {"AutoModel": "m.M"}
CHECK = forward_pass._check
"""The comparison, which other tests leave out."""
TEXT = ("--text", "calib.txt", "--samples", "4", "--window", "8")


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "_check", CHECK)
    monkeypatch.setattr(forward_pass, "_PASSED", set())


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def data() -> Samples:
    return encoders.samples("bert-model", 1)


def write_text(folder: Path) -> None:
    (folder / "calib.txt").write_text("the cat sat on a mat and then the dog ran far away " * 9)


@pytest.mark.parametrize("case", one_of(16, CASES), ids=str)
def test_every_class_of_every_family_is_what_its_blocks_compute(
    dense_cases: Dense, case: Case, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[float] = []
    relative = forward_pass.relative_error

    def keep_difference(expected: Tensor, states: Tensor) -> float:
        difference = relative(expected, states)
        assert difference is not None
        apart.append(difference)
        return difference

    monkeypatch.setattr(forward_pass, "relative_error", keep_difference)
    check_forward(dense_cases.model(case), case.samples(1), messages.append)
    assert messages == []
    assert len(apart) > 2
    assert max(apart) < BOUNDS[torch.float32] / 50


@pytest.fixture(scope="module")
def dense_cases(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return Dense(tmp_path_factory.mktemp("forward"))


def test_a_switch_of_the_config_that_no_description_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics were measured of a model that nobody has, with exit code 0."""
    families.make(tmp_path / "dense")
    write_text(tmp_path)
    initialise = LlamaModel.__init__

    def with_switch(self: LlamaModel, config: LlamaConfig) -> None:
        """Read a key that its config class has no field for, as a later release of transformers might."""
        initialise(self, config)
        for layer in self.layers if getattr(config, "halved_blocks", False) else ():
            layer.mlp.register_forward_hook(lambda module, given, output: output / 2)

    monkeypatch.setattr(LlamaModel, "__init__", with_switch)
    ok("calibrate", "dense", *TEXT, "--collect", "moments", "-o", "stats")
    encoders.edit_files(tmp_path / "dense", lambda tensors, config: config.update(halved_blocks=True) or tensors)
    before = listing()
    line = (
        "dense: transformers' own forward pass and its blocks run one by one do not compute the same: what enters "
        r"block 1 differs by 0\.\d+ of its size on 8 tokens \(at most 0.0001\); LlamaForCausalLM does something that "
        "the description of llama does not say, perhaps by a setting in config.json, so this model can be neither "
        "measured nor pruned"
    )
    for command in (
        ("calibrate", "dense", *TEXT, "-o", "out"),
        ("prune", "dense", "--recipe", "rcpu", "--ratio", "0.5", *TEXT, "-o", "out"),
        ("prune", "dense", "--recipe", "laco-wanda-50", *TEXT, "-o", "out", "--dry-run"),
    ):
        message = read_refusal(*command)
        assert re.fullmatch(line, message), message
        assert listing() == before


def test_without_data_nothing_is_run_and_nothing_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.make(tmp_path / "dense")
    monkeypatch.setattr(forward_pass, "_check", lambda *_: 1 / 0)
    assert "written to out\n" in ok("prune", "dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out")


def test_a_model_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.make(tmp_path / "dense")
    write_text(tmp_path)
    loaded = []
    load = forward_pass.load_model
    monkeypatch.setattr(forward_pass, "load_model", lambda *a, **o: loaded.append(a) or load(*a, **o))
    for out in ("a", "b"):
        ok("calibrate", "dense", *TEXT, "--collect", "moments", "-o", out)
    assert len(loaded) == 1


def test_what_is_not_compared_is_said(
    tmp_path: Path, messages: list[str], data: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders.make(tmp_path / "dense", "bert-model")
    model = open_model("dense")
    size = sum(info.numel for info in model.checkpoint.tensors.values()) * 4
    monkeypatch.setattr(forward_pass, "available_bytes", lambda: 8 * size - 1)
    check_forward(model, data, messages.append)
    assert len(messages) == 1
    assert re.fullmatch(
        r"not compared with transformers' own forward pass: its \S+ KB are more than a part in 8 of the \S+ \w+ of "
        "memory that are free",
        messages[0],
    )
    forward_pass._PASSED.clear()
    encoders.edit_files(tmp_path / "dense", lambda tensors, config: config.update(auto_map=FOREIGN) or tensors)
    (tmp_path / "dense" / "m.py").write_text("raise SystemExit('it was run')")
    check_forward(open_model("dense", Opening(trust=True)), data, messages.append)
    assert (
        messages[1] == "not compared with transformers' own forward pass: it brings code of its own, which is not run"
    )


def test_blocks_that_overflow_where_the_model_does_not(
    tmp_path: Path, messages: list[str], data: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders.make(tmp_path / "dense", "bert-model")
    run = HiddenStream.run

    def overflowing(self: HiddenStream, block: nn.Module, index: int, states: Tensor, rows: slice) -> Tensor:
        return run(self, block, index, states, rows) * (float("inf") if index == 1 else 1)

    monkeypatch.setattr(HiddenStream, "run", overflowing)
    with pytest.raises(UserError, match="what enters block 2 differs by inf of its size"):
        check_forward(open_model("dense"), data, messages.append)


def test_data_that_the_model_refuses_is_a_line(tmp_path: Path, messages: list[str]) -> None:
    """Images of another size, or tokens that it does not know, were a traceback."""
    encoders.make(tmp_path / "dense", "bert-model")
    with pytest.raises(UserError, match=r"^the model refuses its calibration data: "):
        check_forward(open_model(str(tmp_path / "dense")), TokenWindows(torch.full((1, 8), 10**6)), messages.append)
