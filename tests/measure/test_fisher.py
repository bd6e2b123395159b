"""The Fisher metric at sites, against gradients of whole stock models; and what it is for: divergences."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics import fisher as module
from ckpt_prune.measure.statistics.fisher import LABEL_DRAWS, Fisher, measure_fisher
from ckpt_prune.measure.streams import backward, readout
from ckpt_prune.measure.streams.sliced_head import LabelDraw
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import Names
from tests import encoders, families
from tests.families import BLOCKS
from tests.oracles import effects as oracle
from tests.oracles import rotary as pairs_of
from tests.pairs import one_of
from tests.refusals import refusal
from tests.stages.whole import Sources, data_of, sources_of_all, stock

LIMIT = 5
VARIANTS = ["llama-gqa-tied", "llama-biases", "opt", "opt-350m-like", "vit", "bert-pretraining"]
VARIANTS += ["dinov2-swiglu"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return sources_of_all(tmp_path_factory.mktemp("fisher"))


def measure_sites(sources: Sources, variant: str, **options) -> dict[str, Fisher]:
    source = Model.open(sources.folder(variant))
    given = {"device": torch.device("cpu"), "compute_dtype": torch.float32} | options
    blocks = list(measure_fisher(source, SampleRange(data_of(variant), 0, LIMIT), **given))
    assert [block for block, _ in blocks] == list(reversed(range(BLOCKS)))
    return {name: fisher for _, sites in blocks for name, fisher in sites.items()}


def unlikeliest(log_p: Tensor, count: int = 1, _generator: torch.Generator | None = None) -> Tensor:
    """Labels that do not hang on rounding, as a draw would where precision differs."""
    return log_p.argmin(-1, keepdim=True).expand(-1, count)


class _Unlikeliest(LabelDraw):
    """The same, of a vocabulary that is one slice."""

    def see(self, start: int, weights: Tensor, mass: Tensor, total: Tensor) -> None:
        assert start == 0
        self.labels = weights.argmin(1)


def draw_unlikeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "draw_labels", unlikeliest)
    monkeypatch.setattr(readout, "LabelDraw", _Unlikeliest)


# ---- by hand, on a whole model -----------------------------------------------------------------------------------


def losses_of(outputs: list[tuple[str, Tensor]]) -> list[Tensor]:
    """ℓ of every output, summed over samples, each draw by the root of its weight; all draws of labels are one."""
    losses, generator = [], torch.Generator().manual_seed(0)
    for name, output in outputs:
        if name.endswith("logits"):
            log_p = output.log_softmax(-1).flatten(0, -2)
            losses.append(log_p.gather(1, unlikeliest(log_p)).sum() / (len(log_p) / LIMIT) ** 0.5)
        else:
            wide = output.flatten(1)
            for _ in range(LABEL_DRAWS):
                drawn = torch.randn(wide.shape, generator=generator).double()
                projected = (drawn * wide).sum(1) / wide.detach().norm(dim=1)
                losses.append((2 / LABEL_DRAWS) ** 0.5 * projected.sum())
    return losses


def by_hand(model: PreTrainedModel, source: Model, data: Samples, *, rotary: bool = False) -> dict[str, Tensor]:
    """Sums of every site, token by token and pair by pair; `rotary` where there are rotary pairs: of these, too."""
    family = source.family
    spaces = {name: kind for name, kind in family.spaces.items() if rotary or kind.kind != "rotary"}

    def path(block: int, disk: str) -> str:
        (name, *_) = Names(model).parameters(family.tensor(block, disk))
        return name.removesuffix(".weight")

    seen: dict[str, Tensor] = {}
    sites: dict[str, list[str]] = {}
    for block in range(BLOCKS):
        for space, kind in spaces.items():
            modules = [kind.consumer] if space in family.columns else kind.readers
            sites[source.moments_name(block, space)] = [path(block, module) for module in modules]
    for name in {module_path for group in sites.values() for module_path in group}:
        model.get_submodule(name).register_forward_hook(lambda _m, _a, out, name=name: seen.__setitem__(name, out))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    result = model(**data.batch(slice(0, LIMIT)))
    names = [name for name in result if name.endswith("logits")] or ["last_hidden_state"]
    sums: dict[str, Tensor] = {}
    for loss in losses_of([(name, result[name]) for name in names]):
        for site, modules in sites.items():
            (gradient,) = torch.autograd.grad(loss, seen[modules[0]], retain_graph=True)
            if len(modules) == 1:
                value = sum(torch.outer(g, g) for g in gradient.reshape(-1, gradient.shape[-1]))
            else:
                keys = seen[modules[1]].detach()
                value = of_logits(gradient, turn_keys(keys, source) if rotary else keys, source.dimension("head_dim"))
            sums[site] = sums.get(site, 0) + value
    return sums


def of_logits(gradient: Tensor, keys: Tensor, head_dim: int) -> Tensor:
    values = []
    for head in range(gradient.shape[-1] // head_dim):
        columns, total = slice(head * head_dim, (head + 1) * head_dim), 0.0
        shared = gradient.shape[-1] // keys.shape[-1]
        theirs = slice(head // shared * head_dim, (head // shared + 1) * head_dim)
        for g, k in zip(gradient[..., columns], keys[..., theirs], strict=True):
            spread = sum(float((key - k.mean(0)).square().sum()) for key in k) / len(k)
            total += float(g.square().sum()) / spread / len(k) ** 2
        values.append(total)
    return torch.tensor(values, dtype=torch.float64)


def turn_keys(keys: Tensor, source: Model) -> Tensor:
    """Keys of halves, turned by position."""
    heads = keys.view(*keys.shape[:2], -1, source.dimension("head_dim")).numpy()
    pairs, theta = pairs_of.as_complex(heads, "halves"), source.config.rope_parameters["rope_theta"]
    by_head = [[pairs_of.turn_pairs(sample[:, head], theta) for head in range(heads.shape[2])] for sample in pairs]
    rows = [[torch.from_numpy(pairs_of.as_rows(head, "halves")) for head in sample] for sample in by_head]
    return torch.stack([torch.cat(sample, 1) for sample in rows])


@pytest.mark.parametrize("variant", [*one_of(4, VARIANTS), "rotary"])
def test_it_is_that_of_the_whole_model(dense, variant, monkeypatch):
    rotary = variant == "rotary"
    variant = "llama-gqa-tied" if rotary else variant
    draw_unlikeliest(monkeypatch)
    source, samples = Model.open(dense.folder(variant)), data_of(variant)
    if variant in encoders.IMAGES:
        samples = encoders.Pixels(samples.values.double(), samples.tokens)
    expected = by_hand(stock(dense.folder(variant), variant).double(), source, samples, rotary=rotary)
    ours = measure_sites(dense, variant, rotary=rotary)
    assert set(ours) == set(expected)
    for name, fisher in ours.items():
        assert fisher.samples == LIMIT
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(fisher.sums.double(), expected[name].detach(), rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "vit"])
def test_batches_and_where_states_are_change_nothing(dense, variant, monkeypatch, tmp_path):
    in_one_batch = measure_sites(dense, variant)
    tokens = data_of(variant).tokens
    # Five samples as 2 + 2 + 1 through blocks, one by one through the head, pieces of logits, states on disk.
    monkeypatch.setattr("ckpt_prune.measure.streams.hidden_stream.TOKENS_PER_BATCH", 2 * tokens)
    monkeypatch.setattr(backward, "READOUT_TOKENS", tokens - 1)
    monkeypatch.setattr(readout, "CHUNK", 100)
    cut = measure_sites(dense, variant, allocate=StateMemory(0, tmp_path))
    for name, fisher in in_one_batch.items():
        torch.testing.assert_close(cut[name].sums, fisher.sums, rtol=1e-3, atol=1e-5 * float(fisher.sums.abs().max()))


def test_blocks_are_read_twice_whatever_the_depth(dense, monkeypatch):
    source = Model.open(dense.folder("opt"))
    block_of = {name: block for block in range(BLOCKS) for name in source.block_names(block)}
    read, original = [], Checkpoint.read

    def reading(self, names):
        read.extend({block_of[name] for name in names if name in block_of})
        return original(self, names)

    monkeypatch.setattr(Checkpoint, "read", reading)
    measure_sites(dense, "opt")
    assert read == [*range(BLOCKS), *reversed(range(BLOCKS))]


def test_a_gradient_that_overflows_is_named(dense, monkeypatch):
    nothing = {"heads": torch.full((2, 2), torch.inf)}
    monkeypatch.setattr(module, "_pass_block", lambda *_: nothing)
    assert refusal(measure_sites, dense, "llama-gqa-tied") == (
        f"the gradient at model.layers.{BLOCKS - 1}.self_attn.o_proj.weight is not finite: "
        "the model overflows in torch.float32"
    )


def test_keys_that_are_all_equal_have_no_logits_to_move():
    flat = module._square_logit_gradients(torch.ones(1, 3, 4), torch.ones(1, 3, 4), 2)
    assert flat.tolist() == [0, 0]


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "vit"])
def test_half_its_product_with_a_small_error_is_the_divergence(dense, variant, monkeypatch):
    """An error of the last mlp's output that is the same size everywhere and independent of all else; drawn often."""
    monkeypatch.setattr(readout, "DRAWS", 64)
    source, samples = Model.open(dense.folder(variant)), data_of(variant)
    model = stock(dense.folder(variant), variant).double()
    if variant in encoders.IMAGES:
        samples = encoders.Pixels(samples.values.double(), samples.tokens)
    (disk, *_) = Names(model).parameters(source.family.tensor(BLOCKS - 1, source.family.columns["mlp"].consumer))
    size, predicted = 0.02, []
    for seed in range(3):
        monkeypatch.setattr(backward, "_SEED", seed)
        fisher = measure_sites(dense, variant)[source.moments_name(BLOCKS - 1, "mlp")]
        predicted.append(float(fisher.mean.trace()) / 2 * size**2)
    noise = torch.Generator().manual_seed(0)
    moved = copy.deepcopy(model)
    moved.get_submodule(disk.removesuffix(".weight")).register_forward_hook(
        lambda _m, _a, out: out + size * torch.randn(out.shape, generator=noise, dtype=out.dtype)
    )

    def outputs(network: PreTrainedModel) -> list[np.ndarray]:
        with torch.no_grad():
            result = network(**samples.batch(slice(0, LIMIT)))
        names = [name for name in result if name.endswith("logits")] or ["last_hidden_state"]
        return [result[name].double().numpy() for name in names]

    headless = source.family.auto_class == "AutoModel"
    compare, dense_outputs = oracle.relative if headless else oracle.kl, outputs(model)
    true = [sum(compare(*pair) for pair in zip(dense_outputs, outputs(moved), strict=True)) for _ in range(32)]
    assert np.mean(predicted) == pytest.approx(np.mean(true) / LIMIT, rel=0.3)


def test_nothing_of_the_checkpoint_is_changed(dense):
    folder = dense.folder("opt")
    before = families.contents(folder)
    once: list[Tensor] = []
    measure_sites(dense, "opt", allocate=lambda shape, dtype: once.append(torch.empty(shape, dtype=dtype)) or once[-1])
    assert families.contents(folder) == before
    # States before the first block and after each, and gradients of every draw.
    assert len(once) == 1 + BLOCKS + LABEL_DRAWS
    assert all(tensor.shape[0] == LIMIT for tensor in once)
