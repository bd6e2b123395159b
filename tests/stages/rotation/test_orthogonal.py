import pytest
import torch
from torch import Tensor

from ckpt_prune.stages.rotation.orthogonal import (
    RETRACTIONS,
    clip_slopes,
    identity,
    make_rotator,
    orthonormalise,
)
from tests.pairs import dealt
from tests.problems import orthogonal


def defect(q: Tensor) -> float:
    """‖QᵀQ − I‖, the largest of a batch."""
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).norm(dim=(-2, -1)).amax())


def descend(rotator, target: Tensor, steps: int, rate: float) -> None:
    """Towards the orthogonal matrix nearest a target: L = −tr(Qᵀ T)."""
    for step in range(steps):
        rotator.step(rotator.slope(-target), rate * (1 - step / steps))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("method", RETRACTIONS)
def test_starts_where_it_is_told_and_goes_to_the_minimum(method, batch):
    start = orthogonal(*batch, 4, 4, seed=1)
    start[..., 0] *= start.det().sign()[..., None]
    target = start @ torch.linalg.matrix_exp(torch.randn(4, 4, dtype=torch.float64).triu(1).sub_(0).mul(0.5))
    target = torch.linalg.qr(target)[0] * torch.linalg.qr(target)[1].diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    target[..., 0] *= (target.det() * start.det()).sign()[..., None]
    rotator = make_rotator(method, start)
    torch.testing.assert_close(rotator.rotation(), start)
    descend(rotator, target, 300, 0.1)
    assert defect(rotator.rotation()) < 1e-8
    torch.testing.assert_close(rotator.rotation(), target, atol=1e-2, rtol=0)


@pytest.mark.parametrize("method", RETRACTIONS)
def test_a_step_is_down_whatever_the_clip(method):
    start, target = orthogonal(6, 6, seed=3), orthogonal(6, 6, seed=4)
    ends = []
    for clip in (None, 1.0, 1e-3):
        rotator = make_rotator(method, start)
        rotator.step(*clip_slopes([rotator.slope(-target)], clip), 1e-3)
        assert float((rotator.rotation() * target).sum()) > float((start * target).sum())
        ends.append(rotator.rotation())
    # Adam does not see the scale of a first gradient; its epsilon does, a little.
    torch.testing.assert_close(ends[0], ends[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("method", "shape"), dealt(list(RETRACTIONS), [(24, 24), (3, 8, 8)]))
def test_stays_orthogonal_in_float32_for_2000_steps(method, shape):
    rotator = make_rotator(method, identity(shape, dtype=torch.float32))
    g = torch.Generator().manual_seed(0)
    for _ in range(2000):
        rotator.step(rotator.slope(torch.randn(shape, generator=g)), 0.05)
    assert rotator.rotation().dtype == torch.float32
    assert float((rotator.rotation() - identity(shape, dtype=torch.float32)).norm()) > 0.1
    assert defect(rotator.rotation()) < 1e-5


@pytest.mark.parametrize("method", RETRACTIONS)
@pytest.mark.parametrize(
    "direction", [torch.ones(9), torch.eye(9)[0], -3 * torch.eye(9)[0], torch.arange(-4.0, 5.0)], ids=str
)
def test_preserves_a_direction(method, direction):
    u = direction.double()
    rotator = make_rotator(method, identity((9, 9), dtype=torch.float32), preserve=direction)
    torch.testing.assert_close(rotator.rotation(), torch.eye(9))
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        rotator.step(rotator.slope(torch.randn(9, 9, generator=g)), 0.05)
    q = rotator.rotation()
    assert float((q - torch.eye(9)).norm()) > 0.1
    torch.testing.assert_close(q @ direction, direction, atol=1e-5, rtol=0)
    exact = orthonormalise(q, direction)
    torch.testing.assert_close(exact @ u, u, atol=1e-14, rtol=1e-14)
    assert defect(exact) < 1e-13
    torch.testing.assert_close(exact, q.double(), atol=1e-5, rtol=0)


def test_a_direction_must_be_one():
    with pytest.raises(ValueError, match="zero"):
        make_rotator("cayley", torch.eye(3), preserve=torch.zeros(3))


@pytest.mark.parametrize("shape", [(7, 7), (2, 3, 3)])
def test_orthonormalised_is_the_nearest(shape):
    q = orthogonal(*shape, seed=7)
    nearby = (q + 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).float()
    nearest = orthonormalise(nearby)
    u, _, v = torch.linalg.svd(nearby.double())
    torch.testing.assert_close(nearest, u @ v, atol=1e-12, rtol=0)
    assert nearest.dtype == torch.float64
    assert defect(nearest) < 1e-13
