"""What came out of an export: the table of a comparison with PyTorch, and what was written."""

from ckpt_prune.checkpoint.units import counted, human_bytes
from ckpt_prune.cli.options import table
from ckpt_prune.exporting.outcome import Case, Validation
from ckpt_prune.exporting.writing import Exported


def exported_lines(exported: Exported) -> list[str]:
    """What became of an export, in lines; a table's lines come as one element."""
    found = [] if exported.validation is None else proof_lines(exported.validation)
    if exported.manifest is None:
        return [*found, f"the graph does not compute what the model does: nothing is written to {exported.path}"]
    what = exported.manifest
    cache = ", with cache" if what.cached else ""
    if exported.validation is None:
        found.append("not compared with PyTorch: `ckpt-prune validate` does it")
    size = human_bytes(exported.bytes)
    return [
        *found,
        f"{what.task}{cache}, {what.dtype}, opset {what.opset}, {size}: written to {exported.path}",
    ]


def proof_lines(validation: Validation) -> list[str]:
    """What came out: a table of the cases, the checks that failed, and the metrics.

    A table's lines come as one element.
    """
    lines = [validation.note] if validation.note else []
    if validation.cases:
        headers = ["onnxruntime - PyTorch", "max abs", "mean abs", "max rel", "mean rel", "top-1", ""]
        lines.append(table(headers, [_row(case) for case in validation.cases]))
    lines += [f"{_named(case)}: {_where(case)}" for case in validation.cases if not case.passed]
    for metric in validation.metrics:
        show = _percent if metric.name in ("top-1", "agreement") else _decimal
        failed = "" if metric.passed else " FAILED"
        if metric.name in ("agreement", "cosine"):
            lines.append(f"{metric.name} {show(metric.onnxruntime)} ({metric.of}){failed}")
        else:
            ours, theirs = show(metric.onnxruntime), show(metric.pytorch)
            lines.append(f"{metric.name} {ours} in onnxruntime, {theirs} in PyTorch ({metric.of}){failed}")
    lines += [f"{check.name} FAILED: {check.detail}" for check in validation.checks if check.passed is False]
    skipped = [check for check in validation.checks if check.passed is None]
    lines += [f"{check.name}: {check.detail}" for check in skipped]
    lines.append(f"compared on: {validation.data.get('what', 'noise')}")
    verdict = "agrees" if validation.passed else "does NOT agree"
    lines.append(
        f"the graph {verdict} with {validation.against.name} ({validation.dtype}, {validation.provider}, tolerance "
        f"{validation.tolerance:g} of the largest output)"
    )
    return lines


def _row(case: Case) -> list[str]:
    figures = [case.max_abs, case.mean_abs, case.max_rel, case.mean_rel]
    return [
        _named(case),
        *("-" if figure is None else f"{figure:.1e}" for figure in figures),
        "" if case.agreement is None else _percent(case.agreement),
        "ok" if case.passed else "FAILED",
    ]


def _named(case: Case) -> str:
    """A case in words: its output, and what it was read from."""
    size = counted(case.batch, "image") if case.tokens is None else f"{case.batch} x {counted(case.tokens, 'token')}"
    padding = "" if case.padding == "none" else f", padded {case.padding}"
    segments = ", two segments" if case.segments else ""
    cache = {"none": "", "chunks": ", cached in chunks", "steps": ", generated"}[case.cache]
    return f"{case.output}: {size}{padding}{segments}{cache}"


def _where(case: Case) -> str:
    """What is wrong with a failed case, and where."""
    parts = []
    if case.where is not None:
        place = case.where
        token = "" if place.token is None else f", token {place.token}"
        here = (_figure(value) for value in (place.onnxruntime, place.pytorch))
        parts.append(f"row {place.batch}{token}, unit {place.unit} is {next(here)}, in PyTorch {next(here)}")
        if case.largest:
            parts.append(f"the largest is {_figure(case.largest)}")
    if case.note is not None:
        parts.append(case.note)
    return "; ".join(parts)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _decimal(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
