"""Proving that a checkpoint is whole: it loads, it is finite, and it is what its report says it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ckpt_prune._version import __version__
from ckpt_prune.architectures.composite import known_composites, load_composite
from ckpt_prune.architectures.cuts import found_among, touched
from ckpt_prune.architectures.descriptions import OUTSIDE_KEY, described_by
from ckpt_prune.architectures.factors import factor_names
from ckpt_prune.architectures.family import KINDS
from ckpt_prune.architectures.fitting import fitted, fitting_family
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.part import composite_names, part_of
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.architectures.spaces import SpaceName, space_of
from ckpt_prune.architectures.supported import with_description
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import find_changed_files
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError, refuse_unreadable
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.containers.checking import check_shapes
from ckpt_prune.containers.container import stored_container
from ckpt_prune.containers.remote import REMOTE_MODULE, remote_class
from ckpt_prune.evaluation.parity import stock_load_report
from ckpt_prune.job.records import FactoredLinear, MaskedLinear, SiteRecord
from ckpt_prune.modeling_pruned import WEIGHTS_KEY
from ckpt_prune.report.model import Report
from ckpt_prune.report.reading import report_of
from ckpt_prune.sparsity.patterns import GroupPattern, parse_pattern
from ckpt_prune.sparsity.zeros import (
    crowded_groups,
    find_zeros,
    pattern_of_all,
    share_of_all,
    weights_by_module,
)
from ckpt_prune.verification.kept_blocks import dense_at_depth, kept_blocks, mapped_tensors
from ckpt_prune.verification.kept_ends import kept_ends
from ckpt_prune.verification.kept_head import kept_head
from ckpt_prune.verification.kept_stream import kept_in_basis

_CARD = "README.md"
_FACTORS_AWAY = 1e-6
"""Of a weight's norm: sums of the same numbers in another order differ by far less."""
_ONLY_ZEROING = {"magnitude", "wanda"}
"""Mask methods that leave the weights they keep as they were."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked: passed is None where there was nothing to check it against."""

    name: str
    passed: bool | None
    detail: str


def verify(folder: Path, against: Path | None = None, family: Path | None = None) -> list[Check]:
    """Check a checkpoint, and with `against` that what stays is what the dense model had.

    Loads the WHOLE model once, with stock transformers (or, where it has remote code of this tool, with
    `ckpt_prune.load`: the code in the folder is not run).

    Args:
        folder: the checkpoint.
        against: the dense model.
        family: file of a description of the dense model's family; that which the checkpoint carries by default.

    Raises:
        UserError: the folder is no checkpoint at all, or an unfinished one, or `against` is not the model it was made
            from.
    """
    refuse_unfinished(folder)
    checkpoint = Checkpoint.open(folder)
    report = _report(folder)
    description = checkpoint.config.get(OUTSIDE_KEY)
    if family is not None:
        description = parse_json_object(described_by(family).encode())
    dense = None if against is None else _dense(folder, report, against, description)
    part = checkpoint if report is None or report.part is None else part_of(checkpoint, report.part)
    checks = [
        run_check("tensors", lambda: _tensors(checkpoint)),
        run_check("finite", lambda: _finite(checkpoint)),
        run_check("load", lambda: _load(checkpoint)),
        run_check("digests", lambda: _digests(folder, report)),
        run_check("sparsity", lambda: _sparsity(part, report)),
    ]
    if report is not None and dense is not None:
        if report.rotation is not None or report.hidden is not None:
            checks.append(run_check("head", lambda: kept_head(part, _without_gone(dense, report), report)))
        checks.append(run_check("kept units", lambda: _kept(part, _without_gone(dense, report), report)))
    if part.within is not None and dense is not None:
        checks.append(run_check("other parts", lambda: _others(part, dense)))
    return checks


def run_check(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    """Run a check; a UserError in it is its failure.

    Raises:
        UserError: the system could not give a file, which says nothing of what was to be checked.
    """
    try:
        passed, detail = check()
    except UserError as error:
        refuse_unreadable(error)
        passed, detail = False, str(error)
    return Check(name, passed, detail)


def _report(folder: Path) -> Report | None:
    """What the folder says of itself, where that can be checked at all."""
    path = folder / REPORT
    try:
        report = report_of(folder)
        if report is None:
            return None
        if "files" not in report.model_fields_set:
            raise UserError(f"{path} has no digests")
        _groups(report)
    except (UserError, ValueError) as error:
        raise UserError(f"{path} is damaged: prune again") from error
    return report


def _groups(report: Report) -> GroupPattern | None:
    """N:M of the report's mask; None for unstructured, or without one. Raises ValueError where none can be meant."""
    groups = parse_pattern(report.mask.pattern) if report.mask else None
    if groups is not None and report.mask is not None and report.mask.shares is not None:
        kept = report.mask.shares.kept or []
        if any(own > groups.of for own in kept) or any(linear.block >= len(kept) for linear in report.linears):
            raise ValueError("shares of a mask that are not those of its blocks")
    return groups


def _groups_of(report: Report, linear: MaskedLinear) -> GroupPattern | None:
    """N:M of one masked weight; None where it is unstructured, or its block has no zeros."""
    groups = _groups(report)
    if groups is None or report.mask is None or report.mask.shares is None:
        return groups
    own = (report.mask.shares.kept or [])[linear.block]
    return None if own == groups.of else GroupPattern(own, groups.of)


def _rewritten(report: Report) -> str | None:
    """The mask's method where it also changes the weights it keeps."""
    return report.mask.method if report.mask and report.mask.method not in _ONLY_ZEROING else None


def _dense(folder: Path, report: Report | None, against: Path, description: Mapping[str, Any] | None) -> Checkpoint:
    dense = Checkpoint.open(against)
    if description is not None:
        dense = replace(dense, config=with_description(dense.config, description))
    if report is None:
        raise UserError(f"{folder} has no {REPORT}: it cannot be compared with the model it was made from")
    if report.part is not None:
        dense = part_of(dense, report.part)
    if report.source.fingerprint != dense.fingerprint:
        raise UserError(f"{folder} was not made from {dense.path}: its report names {report.source.name}")
    return dense


def _tensors(checkpoint: Checkpoint) -> tuple[bool, str]:
    shapes = {name: info.stored_shape for name, info in checkpoint.stored.items()}
    composite = _is_composite(checkpoint)
    names = composite_names(checkpoint.config) if composite else stored_container(checkpoint).names()
    check_shapes(shapes, names, str(checkpoint.path))
    return True, f"{len(shapes)} tensors have the shapes that config.json says"


def _is_composite(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") in known_composites()


def _others(part: Checkpoint, dense: Checkpoint) -> tuple[bool, str]:
    """What is not in the part is the dense model's, byte for byte."""
    assert part.within is not None
    assert dense.within is not None
    ours, theirs = part.within, dense.within
    if ours.rest.keys() != theirs.rest.keys():
        return False, "the two have other tensors outside the part"
    for name in track(list(ours.rest), "comparing what is outside the part", unit="tensor"):
        pair = [each.whole.read([name])[name] for each in (ours, theirs)]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*(each.flatten().view(torch.uint8) for each in pair)):
            return False, f"{name} is not the dense model's"
    return True, f"{len(ours.rest)} tensors outside the {ours.part} part are the dense model's, bit for bit"


def _finite(checkpoint: Checkpoint) -> tuple[bool, str]:
    checkpoint.check_finite()
    return True, "no NaN, no Inf"


_MISREAD = (
    "a former version wrote it, and stock classes that its shapes fit misread it: prune again, or save it by "
    "ckpt_prune.load(OUT).save_pretrained(NEW)"
)


def _load(checkpoint: Checkpoint) -> tuple[bool, str]:
    remote = remote_class(checkpoint.config, checkpoint.path)
    if _is_composite(checkpoint):
        composite = load_composite(checkpoint.config["model_type"])
        auto, architecture = composite.auto, composite.architecture
    else:
        family = fitting_family(checkpoint)
        auto, architecture = family.auto_class, family.architecture
    found = stock_load_report(checkpoint.path, auto)
    if found.clean and remote is not None:
        former = "" if WEIGHTS_KEY in checkpoint.config else f"; {_MISREAD}"
        return True, f"{remote} (remote code) by ckpt_prune.load: no key missing, unexpected or mismatched{former}"
    if found.clean:
        return True, f"{architecture} by stock transformers: no key missing, unexpected or mismatched"
    return False, found.fault


def _digests(folder: Path, report: Report | None) -> tuple[bool | None, str]:
    if report is None:
        return None, f"no {REPORT}: not written by this tool"
    gone, changed = find_changed_files(folder, report.files)
    if gone is not None:
        return False, f"{gone} is gone"
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        return False, f"{changed[0]} changed since it was written{more}"
    unknown = sorted({*(report.side_files or ())} - {*report.files, REPORT, _CARD})
    former = f"; a former version took no digest of {unknown[0]} and what else is no tensor" if unknown else ""
    code = folder / f"{REMOTE_MODULE}.py"
    if not (report.container.remote_code and code.is_file()):
        return True, f"{len(report.files)} file(s) as written{former}"
    if code.read_bytes() == (files("ckpt_prune") / code.name).read_bytes():
        return True, f"{len(report.files)} file(s) as written, {code.name} is this package's{former}"
    if report.ckpt_prune == __version__:
        return False, f"{code.name} is not this package's, and transformers would run it with trust_remote_code"
    return True, f"{len(report.files)} file(s) as written, {code.name} by ckpt_prune {report.ckpt_prune}{former}"


def _sparsity(checkpoint: Checkpoint, report: Report | None) -> tuple[bool | None, str]:
    """Every masked weight has the zeros of its mask, and its groups hold the pattern."""
    checkpoint, _ = fitted(checkpoint)
    if report is None or report.mask is None or not report.linears:
        return None, f"no mask recorded; {_found_zeros(checkpoint)}"
    groups = _groups(report)
    faults: list[str] = []
    zeros = weights = 0
    for linear in track(report.linears, "checking masks", unit="tensor"):
        tensor = checkpoint.read([linear.weight])[linear.weight]
        own = int((tensor == 0).sum())
        zeros, weights = zeros + own, weights + tensor.numel()
        if fault := _mask_fault(linear, tensor, own, _groups_of(report, linear)):
            faults.append(f"{linear.weight} {fault}")
    if faults:
        return False, f"{faults[0]}; {len(faults)} of {_count(report.linears)} do not hold their mask"
    each = " with its block's N" if groups and report.mask.shares is not None else ""
    holds = f", {groups}{each} holds in every group" if groups else ""
    return True, f"{_count(report.linears)}: {100 * zeros / max(1, weights):.1f} % zeros{holds}"


def _mask_fault(linear: MaskedLinear, tensor: torch.Tensor, zeros: int, groups: GroupPattern | None) -> str | None:
    """How a masked weight differs from what its report says; None where it does not."""
    if tensor.shape != (linear.rows, linear.columns):
        return f"has shape {list(tensor.shape)}, its mask {[linear.rows, linear.columns]}"
    if zeros < linear.zeros:
        return f"has {zeros} zeros, its mask {linear.zeros}"
    if groups is None:
        return None
    if linear.columns % groups.of:
        return f"has rows of {linear.columns} weights, which are no groups of {groups.of}"
    crowded = crowded_groups(tensor, groups.kept, groups.of)
    return f"does not hold {groups} in {crowded} of its groups" if crowded else None


def _found_zeros(checkpoint: Checkpoint) -> str:
    """What share of the blocks' linear weights is zero, and the pattern that all of them hold."""
    checkpoint, family = fitted(checkpoint)
    modules = weights_by_module(checkpoint.tensors, family.block, family.linears)
    found = list(find_zeros(checkpoint, [name for names in modules.values() for name in names]))
    share, pattern = share_of_all(found), pattern_of_all(found)
    holds = f", {pattern} holds in every group" if pattern else ""
    return f"{100 * share:.1f} % of block weights are zero{holds}"


def _count(linears: list[MaskedLinear]) -> str:
    return f"{len(linears)} masked weight{'s' if len(linears) != 1 else ''}"


def _without_gone(dense: Checkpoint, report: Report) -> Checkpoint:
    """The dense model without the blocks that the output lacks."""
    return dense if report.depth is None else dense_at_depth(dense, report.depth)


def _kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool | None, str]:
    """The output holds the dense model's head, its rows of kept units, and its weights that masks keep, unchanged."""
    kept = _kept_in_blocks(checkpoint, dense, report)
    if kept[0] is False or report.rotation is not None or report.hidden is not None:
        return kept
    head = kept_head(checkpoint, dense, report)
    return head if head[0] is False else kept


def _kept_in_blocks(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool | None, str]:
    if report.rotation is None:
        checkpoint, _ = fitted(checkpoint)
    if (report.recovery is not None or report.adapters is not None) and report.rotation is None:
        if report.hidden is not None:
            return None, "the stream has another basis: the weights are not compared with the dense model's"
        norms = report.recovery is not None and report.recovery.trained_norms
        return _kept_outside(checkpoint, dense, whole_blocks=norms)
    if report.rotation is not None:
        return None, "the weights are rotated: they are not compared with the dense model's"
    if report.hidden is not None and report.hidden.energy:
        if report.hidden.kind == "shared":
            return kept_in_basis(checkpoint, dense, report, report.hidden)
        return kept_ends(checkpoint, dense, report.hidden)
    if report.depth is not None and not report.sites:
        return kept_blocks(checkpoint, dense, report.depth)
    if report.factored:
        return _kept_factors(checkpoint, dense, report)
    if report.linears and not report.sites:
        return _kept_weights(checkpoint, dense, report)
    return _kept_rows(checkpoint, dense, report)


def _kept_outside(checkpoint: Checkpoint, dense: Checkpoint, *, whole_blocks: bool) -> tuple[bool, str]:
    """What recovery does not rewrite is the dense model's: outside blocks' linear modules, or outside whole blocks."""
    dense, family = fitted(dense)
    blocks = range(family.dimension(parse_config(dense.config), "layers"))
    trained = {family.tensor(block, module, kind) for block in blocks for module in family.linears for kind in KINDS}
    inside = tuple(family.block.format(block=block) for block in blocks) if whole_blocks else ()
    compared = [name for name in checkpoint.tensors if name not in trained and not name.startswith(inside)]
    for name in track(compared, "comparing", unit="tensor"):
        if name not in dense.tensors or not _same(checkpoint.read([name])[name], dense.read([name])[name]):
            return False, f"{name} is no weight that recovery changes and is not the dense model's"
    return True, (
        f"{len(compared)} tensors outside the recovered {'blocks' if whole_blocks else 'linear modules'} are the dense "
        "ones, bit for bit; "
        "the weights that were recovered are not compared"
    )


def _kept_weights(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool, str]:
    """Masked weights are zero or the dense ones, where their method does no more; other tensors are the dense ones."""
    dense, _ = fitted(dense)
    masked = {linear.weight for linear in report.linears}
    compared = [name for name in checkpoint.tensors if name not in masked or not _rewritten(report)]
    for name in track(compared, "comparing", unit="tensor"):
        if name not in dense.tensors:
            return False, f"{name} is not a tensor of the dense model"
        ours, theirs = checkpoint.read([name])[name], dense.read([name])[name]
        if name in masked and not _same(ours, theirs, zeroed=True):
            return False, f"{name} has weights that are neither zero nor the dense model's"
        if name not in masked and not _same(ours, theirs):
            return False, f"{name} has no mask and is not the dense model's"
    others = f"{len(checkpoint.tensors) - len(masked)} other tensors are the dense ones, bit for bit"
    if _rewritten(report):
        return True, f"{others}; {_count(report.linears)} rewritten by {_rewritten(report)} and not compared"
    return True, f"{_count(report.linears)}: what is not zero is the dense model's; {others}"


def _kept_factors(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool, str]:
    """Products of factors are as far from the dense weights as the report says; other tensors are the dense ones."""
    dense, _ = fitted(dense)
    factors = {name for linear in report.factored for name in factor_names(linear.weight)}
    for name in track([name for name in checkpoint.tensors if name not in factors], "comparing", unit="tensor"):
        if name not in dense.tensors or not _same(checkpoint.read([name])[name], dense.read([name])[name]):
            return False, f"{name} is no factor and is not the dense model's"
    for linear in track(report.factored, "comparing factors", unit="tensor"):
        if fault := _factor_fault(linear, checkpoint, dense):
            return False, f"{linear.weight} {fault}"
    return True, (
        f"{len(report.factored)} products of two factors are as far from the dense weights as {REPORT} says; "
        f"{len(checkpoint.tensors) - len(factors)} other tensors are the dense ones, bit for bit"
    )


def _factor_fault(linear: FactoredLinear, checkpoint: Checkpoint, dense: Checkpoint) -> str | None:
    """How the factors of a weight differ from what the report says; None where they do not."""
    down, up = factor_names(linear.weight)
    if not {down, up} <= checkpoint.tensors.keys():
        return "has no two factors"
    if linear.weight not in dense.tensors or dense.tensors[linear.weight].shape != (linear.rows, linear.columns):
        return f"of the dense model has not the shape {[linear.rows, linear.columns]}"
    own = checkpoint.read([down, up])
    if own[down].shape != (linear.rank, linear.columns) or own[up].shape != (linear.rows, linear.rank):
        return f"has factors of {list(own[up].shape)} and {list(own[down].shape)}, its report of rank {linear.rank}"
    weight = dense.read([linear.weight])[linear.weight].double()
    away = torch.linalg.norm(own[up].double() @ own[down].double() - weight) / torch.linalg.norm(weight)
    if linear.change is not None and abs(away.item() - linear.change) > _FACTORS_AWAY:
        return (
            f"is {away.item():.4g} of its norm away from the product of its factors, {REPORT} says {linear.change:.4g}"
        )
    return None


def _same(ours: torch.Tensor, theirs: torch.Tensor, zeroed: bool = False) -> bool:
    """Whether two tensors are equal; with `zeroed`, where ours is not zero."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return not bool(((ours != theirs) & (ours != 0)).any()) if zeroed else torch.equal(ours, theirs)


def _known(site: SiteRecord, model: Model) -> SpaceName:
    """The space of a site as the family has it. Raises UserError where it has none."""
    name = space_of(site.space, site.expert)
    if name in model.family.spaces:
        return name
    raise UserError(f"{REPORT} keeps units of {name}, which the dense model has not")


def _refitted(model: Model, site: SiteRecord) -> set[str]:
    """Linear modules of each expert that stays which make up for those that went."""
    return set() if model.family.experts is None else model.family.experts.rewritten(site.method)


def _kept_rows(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool, str]:
    """Every producer of a pruned space holds exactly the dense rows of the kept units, where nothing is absorbed."""
    model = Model.of(dense)
    padded = frozenset(report.container.padded)
    masked = {linear.weight for linear in report.linears}
    mapped = mapped_tensors(report.depth, checkpoint.tensors)
    spaces = model.family.spaces
    compared, refits, absorbing = 0, 0, dict[str, int]()
    for block in track(sorted({site.block for site in report.sites}), "comparing", unit="block"):
        sites = {_known(site, model): site for site in report.sites if site.block == block}
        for space, site in sites.items():
            units = model.site_units(space)
            if site.units != units or not all(0 <= unit < units for unit in site.kept):
                return False, f"{REPORT} keeps units of {space} in block {block} that the dense model has not"
        kept = {space: torch.tensor(site.kept, dtype=torch.int64) for space, site in sites.items()}
        narrow = model.stays({space: units for space, units in kept.items() if space not in padded})
        rewritten = {module for space, site in sites.items() for module in spaces[space].rewritten(site.method)}
        for module, kind, dim, lines in touched(model.stays(kept)):
            name = model.tensor(block, module, kind)
            if module in rewritten or name in mapped or name not in model.checkpoint.tensors:
                continue
            if name in masked and _rewritten(report):
                continue
            held = narrow[module, dim][1] if (module, dim) in narrow else model.line_numbers(module, dim)
            ours, theirs = checkpoint.read([name])[name], model.checkpoint.read([name])[name]
            if ours.shape[dim] != len(held):
                return False, f"{name} does not hold the dense model's rows of the kept units"
            ours = ours.index_select(dim, found_among(lines, held))
            if not _same(ours, theirs.index_select(dim, lines), zeroed=name in masked):
                return False, f"{name} does not hold the dense model's rows of the kept units"
        gone = {
            space: units for space, units in kept.items() if space not in padded and len(units) < sites[space].units
        }
        pairs, name = model.pairs_kept(gone), model.pairs_name(block)
        if pairs is not None and not torch.equal(checkpoint.read([name])[name], pairs):
            return False, f"{name} does not name the rotary pairs that are kept"
        refitted = {m for space in sites if space in model.family.routers for m in _refitted(model, sites[space])}
        refits += bool(refitted)
        moved = model.moved_experts(block, kept, refitted)
        for name, before in moved.items():
            if not _same(checkpoint.read([name])[name], model.checkpoint.read([before])[before]):
                return False, f"{name} is not the dense model's {before}"
        makers = {
            space: set(spaces[space].readers) & set(spaces[space].rewritten(s.method)) for space, s in sites.items()
        }
        for own in filter(None, makers.values()):
            names = " and ".join(sorted((model.family.labels[module] for module in own), key="qkv".index))
            absorbing[names] = absorbing.get(names, 0) + 1
        compared += sum(len(site.kept) < site.units and not makers[space] for space, site in sites.items())
    more = "".join(
        f"; {names} of {blocks} blocks are rewritten and not compared" for names, blocks in absorbing.items()
    )
    if refits:
        more += f"; last projections of the experts of {plural(refits, 'block')} are refitted and not compared"
    if _rewritten(report):
        more += f"; {_count(report.linears)} rewritten by {_rewritten(report)} and not compared"
    return True, f"producers of {compared} pruned spaces hold the dense rows, bit for bit{more}"
