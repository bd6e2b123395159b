"""Sizes in time: the table of this machine for a request, and what an output takes beside what it was to take."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.progress import Notices

if TYPE_CHECKING:
    from ckpt_prune.planning.sizes import Timed
    from ckpt_prune.transform.request import Request
    from ckpt_prune.transform.settle import Settled


@dataclass(frozen=True)
class Timing:
    """An output's time beside the dense model's, in nanoseconds.

    Attributes:
        of: what was timed.
        dense, foreseen: by the table.
        measured_dense, measured: of both models whole, in turns; None of models that are too large for it.
    """

    of: str
    dense: float
    foreseen: float
    measured_dense: float | None = None
    measured: float | None = None

    @property
    def line(self) -> str:
        """In words."""
        share = self.foreseen / self.dense
        told = f"{self.of}: foreseen {self.foreseen / 1e6:.4g} ms ({share:.1%} of the dense model's)"
        if self.measured is None or self.measured_dense is None:
            return f"{told}; too large to be timed here: see `ckpt-prune benchmark`"
        error = share / (self.measured / self.measured_dense) - 1
        return (
            f"{told}, measured {self.measured / 1e6:.4g} ms ({self.measured / self.measured_dense:.1%} of "
            f"{self.measured_dense / 1e6:.4g} ms): the share foreseen is {error:+.1%} off"
        )

    def data(self) -> dict[str, Any]:
        """As `--json` prints it, in milliseconds."""
        times = {
            "dense": self.dense,
            "foreseen": self.foreseen,
            "measured_dense": self.measured_dense,
            "measured": self.measured,
        }
        return {"of": self.of} | {key: None if value is None else value / 1e6 for key, value in times.items()}


def with_latencies(request: "Request", say: Notices, *, trust: bool) -> "Request":
    """The request with the table of this machine, where its recipe's size is a latency.

    Args:
        request: as it was asked for.
        say: told what the table is.
        trust: run the checkpoint's own code for its config.

    Raises:
        UserError: the model cannot be timed so.
    """
    size = request.recipe.size
    if size is None or size.kind != "latency" or request.plan is not None:
        return request
    from ckpt_prune.benchmarking.table import HalfStream, table_of, workload_of
    from ckpt_prune.parallel.group import here
    from ckpt_prune.transform.narrowing import half_stream

    half = None if request.recipe.hidden is None else HalfStream(*half_stream(request))

    def measure() -> Any:
        workload = workload_of(request.model.checkpoint.path, size.timed, trust=trust)
        return table_of(request.model, list(request.recipe.spaces), workload, request.device, half)

    table = here().once(measure)
    say(table.line)
    return replace(request, latencies=table.latencies)


def timing_of(settled: "Settled", out: Path, *, trust: bool) -> Timing | None:
    """What an output takes, beside what the table had said; None where its size was no time.

    Args:
        settled: the job that made it.
        out: where it is.
        trust: run the checkpoint's own code.
    """
    from ckpt_prune.transform.sizing import dense_size, size_at

    request = settled.request
    asked = request.whole.recipe.size if request.asked is None else request.asked.size
    if asked is None or asked.kind != "latency" or request.latencies is None:
        return None
    dense, told = dense_size(request.whole, "latency"), size_at(request, "latency", settled.widths)
    found = Timing(f"latency of {asked.timed.words}", dense, told)
    return _measured(found, settled, out, asked.timed, trust=trust)


def _measured(found: Timing, settled: "Settled", out: Path, timed: "Timed", *, trust: bool) -> Timing:
    import torch

    from ckpt_prune.benchmarking.runners import TorchTimer
    from ckpt_prune.benchmarking.table import CHECKED_BYTES, fastest, workload_of
    from ckpt_prune.evaluation.loading import load_model
    from ckpt_prune.parallel.group import here

    def measure() -> Timing:
        if 4 * settled.before.parameters > CHECKED_BYTES:
            return found
        device, folder = settled.request.device, settled.model.checkpoint.path
        timers = [
            TorchTimer(load_model(each, device=device, dtype=torch.float32, trust_remote_code=trust), device)
            for each in (folder, out)
        ]
        dense, ours = fastest(timers, workload_of(folder, timed, trust=trust), "timing the output")
        return replace(found, measured_dense=dense, measured=ours)

    return here().once(measure)
