"""The processes that torchrun has started, by torch.distributed: gloo, and NCCL where each has a GPU of its own."""

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

from ckpt_prune.parallel.group import Several
from ckpt_prune.parallel.watch import Watch

_LONG = timedelta(days=30)
"""For one step: the first process may solve for hours while the others wait. `watch` tells who is alive."""
_SHORTEST, _LONGEST = 0.0001, 0.005
"""Seconds between two looks at whether others have come."""


class EndedError(RuntimeError):
    """Another process has ended while this one waited for it."""


class TorchGroup(Several):
    """This process and the others that torchrun has started.

    Attributes:
        watch: over the others.
    """

    def __init__(self) -> None:
        environment = os.environ
        super().__init__(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"]))
        store, _, _ = next(iter(rendezvous("env://", self.rank, self.size)))
        own = int(environment.get("LOCAL_WORLD_SIZE", self.size))
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= own
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
        self._hosts: list[str] | None = None
        # Before anyone looks for it: to ask for a key that is not there is to wait for it.
        self.watch = Watch(PrefixStore("watch", store), self.rank, self.size, self.name)
        self._hosts = self.once_gathered(socket.gethostname())
        self.watch.begin()

    def once_gathered(self, value: str) -> list[str]:
        """Every process's value, in all of them."""
        found = self.gather(value)
        return self.once(lambda: found or [])

    def name(self, rank: int) -> str:
        """Its rank, and its machine where there are several."""
        several = self._hosts is not None and len(set(self._hosts)) > 1
        return f"rank {rank} ({self._hosts[rank]})" if several and self._hosts else f"rank {rank}"

    def gathered(self, tensor: Tensor) -> list[Tensor] | None:
        """Every process's tensor at the first one. Floating ones go from GPU to GPU where there are any."""
        own = tensor.to(self._wire if tensor.is_floating_point() else "cpu")
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.first else None
        self._wait(dist.gather(own, parts, dst=0, async_op=True))
        return parts

    def spread(self, tensor: Tensor) -> Tensor:
        """The first process's tensor in all of them."""
        self._wait(dist.broadcast(tensor, src=0, async_op=True))
        return tensor

    def close(self) -> None:
        """Part in order, when all is done."""
        # Nobody may miss a process that was merely faster.
        self._wait(dist.barrier(async_op=True))
        self.watch.close()
        dist.destroy_process_group()

    def _wait(self, work: Any) -> None:
        """Wait in Python, where signals are heard, and for as long as nobody has failed."""
        pause = _SHORTEST
        while not work.is_completed():
            if self.watch.end is not None:
                raise EndedError
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        work.wait()
