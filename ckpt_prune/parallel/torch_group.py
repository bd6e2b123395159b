"""The processes that torchrun has started, connected by torch.distributed: gloo, and NCCL if each has its own GPU."""

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckpt_prune.parallel.group import Group
from ckpt_prune.parallel.watch import Watch

_LONG = timedelta(days=30)
"""Limit for one operation: the first process may solve for hours while the others wait. `watch` tells who is alive."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.005
"""Seconds between two looks at whether an operation is done."""


class EndedError(RuntimeError):
    """Another process has ended while this one waited for it."""


class TorchGroup(Group):
    """This process and the others that torchrun has started.

    Attributes:
        watch: over the others.
    """

    def __init__(self) -> None:
        environment = os.environ
        super().__init__(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"]))
        store, _, _ = next(iter(rendezvous("env://", self.rank, self.size)))
        on_machine = int(environment.get("LOCAL_WORLD_SIZE", self.size))
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= on_machine
        self._wire = torch.device("cuda", self.local) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self._wire)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=PrefixStore("sums", store),
            rank=self.rank,
            world_size=self.size,
            timeout=_LONG,
        )
        self._hosts: list[str] = []
        # Before any process looks for its signs: asking for a missing key means waiting for it.
        self.watch = Watch(PrefixStore("watch", store), self.rank, self.size, self.name)
        hosts = self.gather(socket.gethostname()) or []
        self._hosts = self.once(lambda: hosts)
        self.watch.begin()

    def name(self, rank: int) -> str:
        """Return the rank of a process, and its machine if there are several."""
        return f"rank {rank} ({self._hosts[rank]})" if len(set(self._hosts)) > 1 else f"rank {rank}"

    def gather_tensors(self, tensor: Tensor) -> list[Tensor] | None:
        """Return every process's tensor at the first one. Floating ones go from GPU to GPU if there are any."""
        sent = tensor.to(self._wire if tensor.is_floating_point() else "cpu")
        parts = [torch.empty_like(sent) for _ in range(self.size)] if self.first else None
        self._wait(dist.gather(sent, parts, dst=0, async_op=True))
        return parts

    def spread(self, tensor: Tensor) -> Tensor:
        """Return the first process's tensor in all of them."""
        self._wait(dist.broadcast(tensor, src=0, async_op=True))
        return tensor

    def close(self) -> None:
        """Leave the group in order, when all is done."""
        # Nobody may miss a process that was merely faster.
        self._wait(dist.barrier(async_op=True))
        self.watch.close()
        dist.destroy_process_group()

    def _wait(self, work: Any) -> None:
        """Wait in Python, where signals are heard, until the operation is done or a process has failed."""
        pause = _SHORTEST_PAUSE
        while not work.is_completed():
            if self.watch.end is not None:
                raise EndedError
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        work.wait()
