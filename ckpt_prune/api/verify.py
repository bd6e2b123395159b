"""`ckpt_prune.verify`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.model_folder import check_output_folder, resolve_model
from ckpt_prune.common.check import Check, run_check
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD
from ckpt_prune.options.commands import VerifyOptions


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


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Prove that OUT is whole: it loads, is finite, and agrees with its config and the digests in ckpt_prune.json.

    For a masked OUT, the zeros and the pattern that its report states are counted in every weight. For an exported
    graph, alone or in OUT/onnx: the files, operators and weights, that onnxruntime loads it, and that it is the one
    that validation.json says passed.

    This loads the whole model once. The exit code is 1 if a check fails.
    """
    if options.statistics is not None and options.against is None:
        raise UserError("--statistics needs --against MODEL: blocks are computed again from both")
    place = check_output_folder(Path(options.folder))

    from ckpt_prune.common.graph_types import GRAPH_FILES
    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.onnx.checks import verify_graph
    from ckpt_prune.verification import verify as checking
    from ckpt_prune.verification.verify_quantized import is_quantized, verify_quantized

    with spread(options):
        dense = None if options.against is None else resolve_model(options.against)
        if is_quantized(place):
            return Verification(tuple(verify_quantized(place, dense)))
        holds_graph = any((place / file).is_file() for file in GRAPH_FILES.values()) and not any(
            place.glob("*.safetensors")
        )
        if holds_graph or (place / GRAPH_RECORD).is_file():
            return Verification(tuple(verify_graph(place, dense)))
        checks = list(checking.verify(place, dense, options.family))
        if options.statistics is not None and dense is not None:
            from ckpt_prune.runner.recomputing import recompute_blocks

            measured = options.statistics
            checks.append(run_check("recomputed", lambda: recompute_blocks(place, dense, measured)))
        if (place / GRAPH_FOLDER / GRAPH_RECORD).is_file():
            inside = verify_graph(place / GRAPH_FOLDER, place)
            checks += [replace(check, name=f"{GRAPH_FOLDER}: {check.name}") for check in inside]
        return Verification(tuple(checks))
