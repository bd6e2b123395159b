"""Prune from and to a slow disk, with blocks read ahead and written behind, and in turn.

    PYTHONPATH=. python tools/bench_slow_disk.py --text T.txt [--rate 40] [--layers 8]

A made-up Llama of width 1024 is pruned by Wanda-sp in this process. Reading and writing of tensors sleep as long as a
disk of that many megabytes a second would take. Both ways have to give the same bytes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_prune import prune
from ckpt_prune.checkpoint import checkpoint, writer
from ckpt_prune.checkpoint.block_thread import BlockThread


def slow(action: Callable[..., Any], nbytes: Callable[..., int], rate: float) -> Callable[..., Any]:
    """Let an action take as long as its bytes would on a disk of `rate` MB/s."""

    def act_slowly(*given: Any) -> Any:
        time.sleep(nbytes(*given) / (rate * 1e6))
        return action(*given)

    return act_slowly


class InTurn(BlockThread[Any]):
    """Does everything at once, in the caller's thread."""

    def take(self, block: int) -> Any:
        return self._read(block)

    def write(self, write: Callable[[], None]) -> None:
        write()


def main() -> None:
    """Measure both ways, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=40)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    script = Path(__file__).with_name("make_synthetic_llama.py")
    shape = ["--hidden", "1024", "--intermediate", "2816", "--heads", "16", "--layers", str(args.layers)]
    subprocess.run([sys.executable, str(script), str(folder / "model"), *shape], check=True)
    patched: Any = (checkpoint, writer)
    checkpoint_read, writer_write = checkpoint.read_tensor, writer.write_tensor
    outputs = []
    for name, thread in (("in turn", InTurn), ("ahead and behind", BlockThread)):
        from ckpt_prune.checkpoint import block_thread
        from ckpt_prune.stages.shared import walk

        patched[0].read_tensor = slow(checkpoint_read, lambda _handle, info: info.nbytes, args.rate)
        patched[1].write_tensor = slow(writer_write, lambda _handle, info, _tensor: info.nbytes, args.rate)
        block_thread.BlockThread = walk.BlockThread = thread  # type: ignore[misc, assignment]
        out = folder / name.replace(" ", "-")
        start = time.perf_counter()
        given = {"text": [args.text], "samples": 8, "window": 512, "evaluate_samples": 0}
        prune(folder / "model", recipe="wanda-sp", ratio=0.2, output=out, **given)
        seconds = time.perf_counter() - start
        weights = b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))
        outputs.append(weights)
        print(f"{name}: {seconds:.1f} s", flush=True)
    print("the same bytes" if outputs[0] == outputs[1] else "OTHER BYTES")


if __name__ == "__main__":
    main()
