"""`verify`: every check of an output, a rounded model or an exported graph."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.check import Check, run_check
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD
from ckpt_prune.common.graph_types import all_graph_files
from ckpt_prune.evaluation.device_map import spread
from ckpt_prune.onnx.checks import verify_graph
from ckpt_prune.options.commands import VerifyOptions
from ckpt_prune.runner.recomputing import recompute_blocks
from ckpt_prune.verification.verify import verify
from ckpt_prune.verification.verify_quantized import is_quantized, verify_quantized


@dataclass(frozen=True)
class Verification:
    """Checks of an output, each with its name, whether it passed (None if it could not be made), and a detail."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return all(check.passed is not False for check in self.checks)

    def data(self) -> dict[str, Any]:
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}


def verify_output(options: VerifyOptions) -> Verification:
    """Prove that an output is whole (`ckpt_prune.verify`)."""
    place, measured = Path(options.folder), options.statistics
    with spread(options):
        dense = None if options.against is None else resolve_model(options.against)
        if is_quantized(place):
            return Verification(tuple(verify_quantized(place, dense)))
        has_graph = any((place / file).is_file() for file in all_graph_files())
        if (has_graph and not any(place.glob("*.safetensors"))) or (place / GRAPH_RECORD).is_file():
            return Verification(tuple(verify_graph(place, dense)))
        checks = list(verify(place, dense, options.family))
        if measured is not None and dense is not None:
            checks.append(run_check("recomputed", lambda: recompute_blocks(place, dense, measured)))
        if (place / GRAPH_FOLDER / GRAPH_RECORD).is_file():
            inside = verify_graph(place / GRAPH_FOLDER, place)
            checks += [replace(check, name=f"{GRAPH_FOLDER}: {check.name}") for check in inside]
        return Verification(tuple(checks))
