"""`ckpt_prune.verify`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_prune.api.types import AnyModel, AnyPath
from ckpt_prune.checkpoint.model_folder import check_output_folder, resolve_model
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD, QUANTISED_RECORD
from ckpt_prune.common.progress import show_progress
from ckpt_prune.options import SpreadOptions, checked, path_of

if TYPE_CHECKING:
    from ckpt_prune.verification.verify import Check


@dataclass(frozen=True)
class Verification:
    """What was checked of an output.

    Attributes:
        checks: each with its name, whether it passed (None where it could not be made), and what was found.
    """

    checks: tuple["Check", ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}


def verify(
    folder: AnyModel,
    *,
    against: AnyModel | None = None,
    statistics: AnyPath | None = None,
    family: AnyPath | None = None,
    device_map: Literal["auto"] | None = None,
    max_memory: str | Sequence[str] = (),
    progress: bool = True,
) -> Verification:
    """Prove that an output or an exported graph is whole, as `ckpt-prune verify` does. The whole model is loaded.

    Args:
        folder: an output of this tool, or a folder that `export` wrote.
        against: the dense model, or the one that was exported: also check that what was kept is its own.
        statistics: folder that the output was made from, beside `against`: also compute some blocks again, and compare.
        family: file of a description of the dense model's family, where neither this version nor the output has one.
        device_map: "auto": accelerate puts the parts of the model where there is room; None for one device.
        max_memory: most that a device takes of it, "cpu=24GiB" or "0=70GiB".
        progress: show bars on stderr.

    Raises:
        UserError: there is no such folder.
    """
    spreading = checked(SpreadOptions, {"device_map": device_map, "max_memory": max_memory})
    if statistics is not None and against is None:
        raise UserError("--statistics needs --against MODEL: blocks are computed again from both")
    place = check_output_folder(Path(path_of(folder)))

    from ckpt_prune.evaluation.device_map import spread
    from ckpt_prune.onnx.apart import sessions_apart
    from ckpt_prune.onnx.session import FILES
    from ckpt_prune.onnx.verify import verify_graph
    from ckpt_prune.verification import verify as checking
    from ckpt_prune.verification.verify_quantized import verify_quantized

    with show_progress(progress), sessions_apart(), spread(spreading):
        dense = None if against is None else resolve_model(path_of(against))
        if (place / QUANTISED_RECORD).is_file():
            return Verification(tuple(verify_quantized(place, dense)))
        holds_graph = any((place / file).is_file() for file in FILES.values()) and not any(place.glob("*.safetensors"))
        if holds_graph or (place / GRAPH_RECORD).is_file():
            return Verification(tuple(verify_graph(place, dense)))
        checks = list(checking.verify(place, dense, None if family is None else Path(family)))
        if statistics is not None and dense is not None:
            from ckpt_prune.runner.recomputing import recomputed

            measured = Path(statistics)
            checks.append(checking.run_check("recomputed", lambda: recomputed(place, dense, measured)))
        if (place / GRAPH_FOLDER / GRAPH_RECORD).is_file():
            inside = verify_graph(place / GRAPH_FOLDER, place)
            checks += [replace(check, name=f"{GRAPH_FOLDER}: {check.name}") for check in inside]
        return Verification(tuple(checks))
