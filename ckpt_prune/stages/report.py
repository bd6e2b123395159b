"""`ckpt_prune.json`: what an output says of itself; reading it, or a plan, without torch.

Files of every version with version number 1 are read: keys that are absent have defaults, unknown keys stay.
"""

from pathlib import Path

from pydantic import ValidationError

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.checkpoint.model_folder import suggest_folders
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.job.records import PlanFile, SiteRecord
from ckpt_prune.job.report import CommonReport, UsedRecipe
from ckpt_prune.stages.bare.records import BareFields
from ckpt_prune.stages.depth.records import DepthFields
from ckpt_prune.stages.hidden.records import HiddenFields
from ckpt_prune.stages.low_rank.records import LowRankFields
from ckpt_prune.stages.mask.records import MaskFields
from ckpt_prune.stages.quantize.records import QuantizeFields
from ckpt_prune.stages.recovery.records import RecoveryFields
from ckpt_prune.stages.rotation.records import RotationFields
from ckpt_prune.stages.spaces.records import SpacesFields
from ckpt_prune.stages.vocabulary.records import VocabularyFields


class Report(
    QuantizeFields,
    RecoveryFields,
    LowRankFields,
    MaskFields,
    SpacesFields,
    RotationFields,
    HiddenFields,
    DepthFields,
    BareFields,
    VocabularyFields,
    CommonReport,
):
    """The contents of an output's `ckpt_prune.json`: common fields, and those of every stage."""


AnyPlan = PlanFile[UsedRecipe, SiteRecord]
"""A plan of any version, to be shown."""
_WANTED = "give a folder that `ckpt-prune prune` wrote, or a plan file"


def find_report(folder: Path) -> Report | None:
    """Read the report of an output of this tool; None for other checkpoints."""
    path = folder / REPORT
    return _read_report(path) if path.is_file() else None


def read_report_or_plan(path: Path) -> Report | AnyPlan:
    """Read the report of an output, given the folder or the report in it; or a plan."""
    file = _file(path)
    if file.name == REPORT:
        return _read_report(file)
    try:
        values = parse_json_object(_bytes(file))
        return AnyPlan.read(values) if "model_path" in values else Report.read(values)
    except ValueError as error:  # pydantic's are ValueErrors as well
        raise UserError(f"{file} is no plan ({_reason(error)}): {_WANTED}") from error


def _read_report(file: Path) -> Report:
    try:
        return Report.read(parse_json_object(_bytes(file)))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({_reason(error)}): prune again") from error


def _bytes(file: Path) -> bytes:
    try:
        return read_input(file)
    except OSError as error:
        meant = suggest_folders(str(file))
        raise UserError(f"{file} cannot be read ({error.strerror}){meant}: {_WANTED}") from error


def _file(path: Path) -> Path:
    try:
        is_folder = path.is_dir()
    except OSError:  # a name that no file can have
        is_folder = False
    if is_folder:
        refuse_unfinished(path)
    if is_folder and not (path / REPORT).is_file():
        raise UserError(f"{path} has no {REPORT}: {_WANTED}")
    return path / REPORT if is_folder else path


def _reason(error: ValueError) -> str:
    """Return the place of the first thing that does not fit, or the words of the JSON parser, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return " ".join(str(error).split())
