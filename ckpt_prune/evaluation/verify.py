"""Proving that a checkpoint is whole: it loads, it is finite, and it is what its report says it is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from ckpt_prune.architectures.family import Family, SpaceName, family_of
from ckpt_prune.architectures.skeleton import expected_shapes, parse_config, tied_names
from ckpt_prune.checkpoint.digests import sha256_files
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation.loading import quiet_transformers
from ckpt_prune.evaluation.parity import stock_load_report
from ckpt_prune.loading import load, remote_class
from ckpt_prune.progress import track
from ckpt_prune.transform.containers import Container
from ckpt_prune.transform.engine import unit_columns
from ckpt_prune.transform.layout import check_shapes
from ckpt_prune.transform.prune import REPORT


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


class _Report(BaseModel):
    """What is checked of an output's report; the rest of it is for readers."""

    source: _Source
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
    return Container(
        checkpoint.config["model_type"], checkpoint.config, remote_class(checkpoint.config, checkpoint.path)
    )


def _tensors(checkpoint: Checkpoint) -> tuple[bool, str]:
    family_of(checkpoint.config)
    skeleton = _container(checkpoint).skeleton()
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    check_shapes(shapes, expected_shapes(skeleton), tied_names(skeleton), str(checkpoint.path))
    return True, f"{len(shapes)} tensors have the shapes that config.json says"


def _finite(checkpoint: Checkpoint) -> tuple[bool, str]:
    checkpoint.check_finite()
    return True, "no NaN, no Inf"


def _load(checkpoint: Checkpoint) -> tuple[bool, str]:
    remote = remote_class(checkpoint.config, checkpoint.path)
    if remote is not None:
        # The shapes were compared with the class itself above; this shows that it can be built and filled.
        try:
            with quiet_transformers():
                load(checkpoint.path)
        except Exception as error:  # transformers raises anything here
            return False, f"ckpt_prune.load: {' '.join(str(error).split())[:300]}"
        return True, f"{remote} (remote code) by ckpt_prune.load"
    found = stock_load_report(checkpoint.path)
    if found.clean:
        architecture = family_of(checkpoint.config).architecture
        return True, f"{architecture} by stock transformers: no key missing, unexpected or mismatched"
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
    """Every producer of a pruned space holds exactly the dense rows of the kept units."""
    family = family_of(dense.config)
    config = parse_config(dense.config)
    sites = report.sites
    for site in track(sites, "comparing", total=len(sites), unit="site"):
        if not set(site.kept) <= set(range(family.units(config, site.space))):
            return False, f"{REPORT} keeps units of {site.space} in block {site.block} that the dense model has not"
        for name, rows in _producer_rows(family, config, site):
            if name not in dense.tensors:
                continue
            ours, theirs = checkpoint.read([name])[name], dense.read([name])[name]
            if not torch.equal(ours, theirs[rows]):
                return False, f"{name} does not hold the dense model's rows of the kept units"
    pruned = {(s.block, s.space) for s in sites if len(s.kept) < s.units}
    return True, f"producers of {len(pruned)} pruned spaces hold the dense rows, bit for bit"


def _producer_rows(family: Family, config: Any, site: _Site) -> list[tuple[str, torch.Tensor]]:
    kept = torch.tensor(site.kept, dtype=torch.int64)
    found = []
    for module, factors in family.spaces[site.space].producers.items():
        rows = unit_columns(kept, family.per_unit(config, factors))
        found += [(family.tensor(site.block, module, kind), rows) for kind in ("weight", "bias")]
    return found
