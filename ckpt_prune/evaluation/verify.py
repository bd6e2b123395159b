"""Proving that a checkpoint is whole: it loads, it is finite, and it is what its report says it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from ckpt_prune.architectures.family import Family, SpaceName
from ckpt_prune.architectures.fitting import fitting_family
from ckpt_prune.architectures.remote import remote_class
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.filenames import REPORT
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.parity import stock_load_report
from ckpt_prune.progress import track
from ckpt_prune.transform.containers import Container
from ckpt_prune.transform.layout import check_shapes
from ckpt_prune.transform.sites import rows_of_heads_left, unit_rows


@dataclass(frozen=True)
class Check:
    """One thing that was checked: passed is None where there was nothing to check it against."""

    name: str
    passed: bool | None
    detail: str


class _Source(BaseModel):
    name: str
    fingerprint: str


class _Site(BaseModel):
    block: int
    space: SpaceName
    units: int
    kept: list[int]
    method: str = "none"


class _Container(BaseModel):
    padded: list[SpaceName] = []


class _Report(BaseModel):
    """What is checked of an output's report; the rest of it is for readers."""

    source: _Source
    container: _Container
    files: dict[str, str]
    sites: list[_Site]


def verify(folder: Path, against: Path | None = None) -> list[Check]:
    """Check a checkpoint, and with `against` that what stays is what the dense model had.

    Loads the WHOLE model once, with stock transformers (or, where it has remote code of this tool, with
    `ckpt_prune.load`: the code in the folder is not run).

    Raises:
        UserError: the folder is not a checkpoint at all, or `against` is not the model it was made from.
    """
    checkpoint = Checkpoint.open(folder)
    report = _report(folder)
    dense = None if against is None else _dense(folder, report, against)
    checks = [
        _guarded("tensors", lambda: _tensors(checkpoint)),
        _guarded("finite", lambda: _finite(checkpoint)),
        _guarded("load", lambda: _load(checkpoint)),
        _guarded("digests", lambda: _digests(folder, report)),
    ]
    if report is not None and dense is not None:
        checks.append(_guarded("kept units", lambda: _kept(checkpoint, dense, report)))
    return checks


def _guarded(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    try:
        passed, detail = check()
    except UserError as error:
        passed, detail = False, str(error)
    return Check(name, passed, detail)


def _report(folder: Path) -> _Report | None:
    path = folder / REPORT
    if not path.is_file():
        return None
    try:
        return _Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path} is damaged: prune again") from error


def _dense(folder: Path, report: _Report | None, against: Path) -> Checkpoint:
    dense = Checkpoint.open(against)
    if report is None:
        raise UserError(f"{folder} has no {REPORT}: it cannot be compared with the model it was made from")
    if report.source.fingerprint != dense.fingerprint:
        raise UserError(f"{folder} was not made from {dense.path}: its report names {report.source.name}")
    return dense


def _container(checkpoint: Checkpoint) -> Container:
    remote = remote_class(checkpoint.config, checkpoint.path)
    architecture = "" if remote else fitting_family(checkpoint).architecture
    return Container(checkpoint.config["model_type"], checkpoint.config, remote, architecture=architecture)


def _tensors(checkpoint: Checkpoint) -> tuple[bool, str]:
    skeleton = _container(checkpoint).skeleton()
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    check_shapes(shapes, skeleton, str(checkpoint.path))
    return True, f"{len(shapes)} tensors have the shapes that config.json says"


def _finite(checkpoint: Checkpoint) -> tuple[bool, str]:
    checkpoint.check_finite()
    return True, "no NaN, no Inf"


def _load(checkpoint: Checkpoint) -> tuple[bool, str]:
    remote = remote_class(checkpoint.config, checkpoint.path)
    family = fitting_family(checkpoint)
    found = stock_load_report(checkpoint.path, family.auto_class)
    if found.clean and remote is not None:
        return True, f"{remote} (remote code) by ckpt_prune.load: no key missing, unexpected or mismatched"
    if found.clean:
        return True, f"{family.architecture} by stock transformers: no key missing, unexpected or mismatched"
    parts = {"missing": found.missing, "unexpected": found.unexpected, "mismatched": found.mismatched}
    return False, "; ".join(f"{len(v)} {k}, first {v[0]}" for k, v in parts.items() if v)


def _digests(folder: Path, report: _Report | None) -> tuple[bool | None, str]:
    if report is None:
        return None, f"no {REPORT}: not written by this tool"
    absent = [name for name in report.files if not (folder / name).is_file()]
    if absent:
        return False, f"{absent[0]} is gone"
    changed = [n for n, digest in sha256_files(folder, report.files).items() if digest != report.files[n]]
    if changed:
        return False, f"{changed[0]} changed since it was written"
    return True, f"{len(report.files)} file(s) as written"


def _kept(checkpoint: Checkpoint, dense: Checkpoint, report: _Report) -> tuple[bool, str]:
    """Every producer of a pruned space holds exactly the dense rows of the kept units, where nothing is folded in."""
    family = fitting_family(dense)
    config = parse_config(dense.config)
    padded = frozenset(report.container.padded)
    compared = 0
    for block in track(sorted({site.block for site in report.sites}), "comparing", unit="block"):
        sites = {site.space: site for site in report.sites if site.block == block}
        for site in sites.values():
            if not set(site.kept) <= set(range(site.units)) or site.units != family.site_units(config, site.space):
                return False, f"{REPORT} keeps units of {site.space} in block {block} that the dense model has not"
        in_heads = {
            family.tensor(block, module, kind)
            for module in (family.modules("qk") if family.logits else [])
            for kind in ("weight", "bias")
        }
        for name, rows in _producer_rows(family, config, block, sites, dense):
            ours, theirs = checkpoint.read([name])[name], dense.read([name])[name]
            own = rows
            if "heads" in sites and "heads" not in padded and name in in_heads:
                width = family.dimension(config, "head_dim")
                own = rows_of_heads_left(rows, torch.tensor(sites["heads"].kept), width)
            held = ours if len(ours) == len(rows) else ours[own]
            if not torch.equal(held, theirs[rows]):
                return False, f"{name} does not hold the dense model's rows of the kept units"
        compared += sum(len(site.kept) < site.units and site.method != "logit" for site in sites.values())
    folded = sum(site.method == "logit" for site in report.sites)
    more = f"; q and k of {folded} blocks are rewritten and not compared" if folded else ""
    return True, f"producers of {compared} pruned spaces hold the dense rows, bit for bit{more}"


def _producer_rows(
    family: Family, config: Any, block: int, sites: Mapping[SpaceName, _Site], dense: Checkpoint
) -> list[tuple[str, torch.Tensor]]:
    """On-disk names of what only loses rows, and the dense rows that stay."""
    rows: dict[str, torch.Tensor] = {}
    folded: set[str] = set()
    for site in sites.values():
        kept = torch.tensor(site.kept, dtype=torch.int64)
        for module, stacked in family.producers(site.space).items():
            if site.method == "logit":
                folded.add(module)
            for kind in ("weight", "bias"):
                name = family.tensor(block, module, kind)
                if name in dense.tensors and module not in folded:
                    own = unit_rows(kept, site.units, dense.tensors[name].shape[0], stacked)
                    earlier = rows.get(name)
                    rows[name] = own if earlier is None else earlier[torch.isin(earlier, own)]
    return list(rows.items())
