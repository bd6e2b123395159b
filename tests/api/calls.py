"""Calls that a type checker accepts, and calls that it must not: mypy reads them with the package, nothing runs them.

An error that is expected stands in a comment; mypy says so if there is none.
"""

from pathlib import Path

import ckpt_prune as cp

pruned = cp.prune("dense", output=Path("out"), text=["a.txt"], ratio="20%", overrides={"container": "any"})
cp.evaluate(pruned, against="dense", text="a.txt", window=16)
cp.recover(pruned, dense="dense", output="out", text="a.txt", epochs=None, max_corrupt=0.1)
cp.export(pruned, output="out", dtype=["fp32", "int8"], max_loss="1%")

cp.prune("dense", output="out", ratoi=0.2)  # type: ignore[call-arg]
cp.prune("dense", output="out", samples="many")  # type: ignore[arg-type]
cp.calibrate("dense", output="out", choose="last")  # type: ignore[arg-type]
cp.recover("pruned")  # type: ignore[call-arg]
print(pruned.paths)  # type: ignore[attr-defined]
