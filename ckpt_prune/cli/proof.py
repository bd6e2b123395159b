"""Lines about exported graphs: the table of a comparison with PyTorch, and the files that were written."""

import math

from ckpt_prune.common.formatting import format_distinctly, human_bytes, plural
from ckpt_prune.onnx.export import Exported, count_graph_bytes
from ckpt_prune.onnx.records import Case, Continuation, Metric, Quantization, Validation, Validations
from ckpt_prune.show.section import Table
from ckpt_prune.show.terminal import print_table


def exported_lines(exported: Exported) -> list[str]:
    """Return the lines about an export. Those of a table come as one element."""
    lines = [] if exported.validation is None else proof_lines(exported.validation)
    if exported.manifest is None:
        wrong = [each for each in exported.validation.graphs if not each.passed] if exported.validation else []
        lost = all(each.max_loss is not None for each in wrong)
        why = "loses more than is allowed" if lost else "does not compute what the model does"
        return [*lines, f"the graph {why}: nothing is written to {exported.path}"]
    what = exported.manifest
    cache = ", with cache" if what.cached else ""
    if exported.validation is None:
        lines.append("not compared with PyTorch: `ckpt-prune validate` does it")
    for graphs in what.split_by_type():
        first, size = graphs.graph, human_bytes(exported.bytes[graphs.dtype])
        if len(graphs.graphs) > 1:
            sizes = ((each.stack, human_bytes(count_graph_bytes(exported.path, each.file))) for each in graphs.graphs)
            size += f" ({', '.join(f'{stack} {own}' for stack, own in sizes)})"
        for graph in graphs.graphs:
            rounding = [] if graph.quantization is None else rounding_lines(graph.quantization)
            lines += rounding if graph.stack is None else [f"{graph.stack}: {line}" for line in rounding]
        lines.append(f"{what.task}{cache}, {first.dtype}, opset {first.opset}, {size}: written to {exported.path}")
    return lines


def rounding_lines(record: Quantization) -> list[str]:
    """How the weights of a graph are stored, and what they were picked by, which is not what the proof measures."""
    stored = ", ".join(f"{count} in {kind}" for kind, count in record.weights.items())
    blocks = any("blocks" in kind for kind in record.weights)
    how = [f"of {record.block_size}"] if blocks else []
    how += ["symmetric"] if blocks and record.symmetric else []
    how += [f"{record.padded} with padded last blocks"] if record.padded else []
    how += [f"rounded {'to the nearest' if record.rounding == 'nearest' else 'by GPTQ'}"]
    lines = [f"weights: {stored} ({', '.join(how)})"]
    if record.loss is not None:
        lines.append(
            f"chosen on {record.measured_on}: {_UNITS[record.unit]} {record.loss:.2g}, and about {record.allowed:.2g} "
            "is allowed; the lines above say what the whole proof finds"
        )
    return lines


_UNITS = {"KL": "KL", "energy": "lost energy of the features"}


def proof_lines(validations: Validations) -> list[str]:
    """Return the `graph_lines` of each graph, with its name if there are several."""
    lines = []
    for each in validations.graphs:
        lines += [f"{each.file}:"] if len(validations.graphs) > 1 else []
        lines += graph_lines(each)
    return lines


def graph_lines(validation: Validation) -> list[str]:
    """Return a table of the cases, the checks that failed, and the metrics.

    A table's lines come as one element.
    """
    lines = [validation.note] if validation.note else []
    if validation.cases and validation.max_loss is None:
        headers = ["onnxruntime - PyTorch", "max abs", "mean abs", "max rel", "mean rel", "top-1", ""]
        lines.append(print_table(Table(headers, [_row(case) for case in validation.cases])))
    lines += [f"{_name_case(case)}: {_where(case)}" for case in validation.cases if not case.passed]
    for metric in validation.metrics:
        show = _percent if metric.name in ("top-1", "agreement") else _decimal
        failed = "" if metric.passed else " FAILED"
        where = "" if metric.against is None else f" of {metric.against}"
        rounded = _alike(metric) if validation.max_loss is not None or metric.against is not None else ""
        if metric.name in ("agreement", "cosine"):
            place = f" with PyTorch{where}" if where else ""
            lines.append(f"{metric.name}{place} {show(metric.onnxruntime)} ({metric.of}){rounded}{failed}")
        else:
            ours, theirs = show(metric.onnxruntime), show(metric.pytorch)
            lines.append(
                f"{metric.name} {ours} in onnxruntime, {theirs} in PyTorch{where} ({metric.of}){rounded}{failed}"
            )
    lines += [describe_continuation(each) for each in validation.continuations]
    lines += [f"{check.name} FAILED: {check.detail}" for check in validation.checks if check.passed is False]
    skipped = [check for check in validation.checks if check.passed is None]
    lines += [f"{check.name}: {check.detail}" for check in skipped]
    lines.append(f"compared on: {validation.data.get('what', 'noise')}")
    verdict = "agrees" if validation.passed else "does NOT agree"
    kind = validation.dtype
    verdict_words = (
        f"tolerance {validation.tolerance:g} of the largest output"
        if validation.max_loss is None
        else f"{100 * validation.max_loss:.4g}% of the metric may be lost"
    )
    about = f"({kind}, {validation.provider}, {verdict_words})"
    losses = zip(validation.metrics, validation.losses(), strict=True)
    verdicts = [(metric.against, loss.verdict) for metric, loss in losses]
    own = next((said for against, said in verdicts if against is None and said is not None), None)
    # Beside its own model there is one verdict: what is lost may be more than is good, and no more than is allowed.
    if own is not None and validation.passed:
        lines.append(f"the graph keeps to what is allowed {about}, and still {own}")
    else:
        lines.append(f"the graph {verdict} with {validation.against.name} {about}")
    return lines + [said for against, said in verdicts if against is not None and said is not None]


def _alike(metric: Metric) -> str:
    """Say how much is lost, and how alike the predictions are."""
    parts = []
    if metric.difference is not None:
        most = math.inf if metric.tolerance is None else metric.tolerance
        parts.append(f"{format_distinctly(metric.difference, most, '%', 2)[0]} lost")
    parts += [] if metric.kl is None else [f"KL {metric.kl:z.4f}"]
    parts += [] if metric.same is None else [f"{metric.same:.1%} of the predictions the same"]
    return f": {', '.join(parts)}"


def describe_continuation(each: Continuation) -> str:
    """Show two continuations of a text: a rounded graph may choose other words, and that is not checked."""
    start = f"an example, not a check: after {each.prompt!r} onnxruntime writes {each.onnxruntime!r}"
    if each.same == each.tokens:
        return f"{start}, as PyTorch does"
    return f"{start}, PyTorch {each.pytorch!r} (other words from token {each.same + 1} of {each.tokens} on)"


def _row(case: Case) -> list[str]:
    figures = [case.max_abs, case.mean_abs, case.max_rel, case.mean_rel]
    return [
        _name_case(case),
        *("-" if figure is None else f"{figure:.1e}" for figure in figures),
        "" if case.agreement is None else _percent(case.agreement),
        "ok" if case.passed else "FAILED",
    ]


def _name_case(case: Case) -> str:
    """Return a case in words: its output, and what it was read from."""
    size = plural(case.batch, "image") if case.tokens is None else f"{case.batch} x {plural(case.tokens, 'token')}"
    padding = "" if case.padding == "none" else f", padded {case.padding}"
    segments = ", two segments" if case.segments else ""
    cache = {"none": "", "chunks": ", cached in chunks", "steps": ", generated"}[case.cache]
    return f"{case.output}: {size}{padding}{segments}{cache}"


def _where(case: Case) -> str:
    """Say where a failed case is wrong, and how."""
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
