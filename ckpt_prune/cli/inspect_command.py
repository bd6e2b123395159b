"""`ckpt-prune inspect`."""

from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import inspect
from ckpt_prune.cli.command import Command, table_of
from ckpt_prune.show.section import Table, name_blocks
from ckpt_prune.show.terminal import print_table

if TYPE_CHECKING:
    from ckpt_prune.inspection.answer import (
        Description,
        GraphsDescription,
        ModelDescription,
        PartsDescription,
        RemoteDescription,
        SpaceDescription,
        SparsityDescription,
    )
    from ckpt_prune.model.family_keys import Found


def _show(description: "Description | PartsDescription", options: dict[str, Any]) -> None:
    from ckpt_prune.inspection.answer import GraphsDescription, PartsDescription, RemoteDescription

    if isinstance(description, PartsDescription):
        for number, (name, each) in enumerate(description.parts.items()):
            click.echo(f"{chr(10) * bool(number)}{name} part")
            _show(each, options)
    elif isinstance(description, RemoteDescription):
        _print_remote(description)
    elif isinstance(description, GraphsDescription):
        _print_graphs(description)
    else:
        _print(description)


def _print_sparsity(found: "SparsityDescription") -> None:
    from ckpt_prune.common.formatting import human_count

    rows = [
        {
            "module": name,
            "tensors": str(zeros.tensors),
            "weights": human_count(zeros.weights),
            **{each: f"{getattr(zeros, each):.1%}" for each in ("min", "mean", "max")},
            "pattern": zeros.pattern or "-",
        }
        for name, zeros in [*found.modules.items(), ("all", found.blocks)]
    ]
    click.echo("\nzeros in the linear weights of the blocks; pattern: N:M, held in every group of all the tensors:")
    click.echo(table_of(rows))


def _print_remote(found: "RemoteDescription") -> None:
    from ckpt_prune.common.formatting import human_bytes, human_count

    facts = {
        "model": found.model,
        "family": f"{found.family} ({found.architecture}, remote code of this tool)",
        "for": found.purpose,
        "weights": f"{found.dtype}, {human_bytes(found.bytes)} in {found.files} file(s)",
        "parameters": human_count(found.parameters),
        "FLOPs": found.flops and f"{human_count(found.flops)} for one sample of {found.tokens} tokens",
        "KV cache": found.cache and f"{human_bytes(found.cache)} a token",
        "made from": found.source and f"{found.source} by recipe {found.recipe}",
        "container": found.note,
    }
    for key, value in facts.items():
        if value:
            click.echo(f"{key:<11} {value}")
    click.echo("\nto drop units, prune the dense model instead; of recipes that prune, only masks go on this output")
    if found.sparsity is not None:
        _print_sparsity(found.sparsity)


def _print_graphs(found: "GraphsDescription") -> None:
    from ckpt_prune.common.formatting import human_bytes, plural

    facts = {
        "folder": found.model,
        "holds": f"{plural(len(found.graphs), 'ONNX graph')}, {human_bytes(found.bytes)}; no checkpoint",
        "for": found.task + (", with cache" if found.cached else ""),
        "fused for": found.provider and f"onnxruntime's {found.provider.upper()} provider",
        "made from": f"{found.source} ({found.fingerprint[:12]}), by ckpt_prune {found.versions['ckpt_prune']}",
        "compared on": found.compared_on,
    }
    for key, value in facts.items():
        if value:
            click.echo(f"{key:<11} {value}")
    proven = {True: "yes", False: "no, it failed", None: "not compared"}
    rows = [
        {
            "graph": graph.file,
            "type": graph.dtype,
            "opset": str(graph.opset),
            "bytes": human_bytes(graph.bytes),
            "rounded weights": ", ".join(f"{count} in {kind}" for kind, count in graph.weights.items()) or "-",
            "proven": proven[graph.proven],
        }
        for graph in found.graphs
    ]
    click.echo(f"\n{table_of(rows)}")
    if any(graph.proven is None for graph in found.graphs):
        click.echo(f"`ckpt-prune validate {quote(found.model)}` compares graphs with the model they were made from")


def _print_proofs(found: "Found") -> None:
    words = {True: "same", False: "differs", None: "-"}
    rows = [
        {
            "proven": name,
            "units reordered together": words[proof.together],
            "in one tensor alone": words[not proof.alone],
            "fewer, and the same zeroed": words[proof.fewer],
        }
        for name, proof in found.proofs.items()
    ]
    click.echo(f"\noutputs of a small random model, transformers {found.transformers}:\n{table_of(rows)}")
    for name, why in found.whole.items():
        click.echo(f"{name}: whole, {why}")


def _in_steps(space: "SpaceDescription") -> str:
    return f" in steps of {space.step}" if space.step > 1 else ""


def _print(found: "ModelDescription") -> None:
    from ckpt_prune.common.formatting import human_bytes, human_count

    of_tokens = f"sample of {found.tokens} tokens"
    sample = of_tokens if found.image is None else "image of {} x {} pixels, all stages".format(*found.image)
    span = " to ".join(dict.fromkeys(map(human_count, (found.block.fewest, found.block.most))))
    facts: dict[str, str | None] = {
        "model": found.model + ("" if found.weights else " (config only)"),
        "family": f"{found.family} ({found.architecture})",
        "for": found.purpose,
        "weights": f"{found.dtype}, {human_bytes(found.bytes)} in {found.files} file(s)"
        + (f"; in files {found.stored}" if found.stored else ""),
        "parameters": human_count(found.parameters) + (", tied head" if found.tied_head else ""),
        "of these": ", ".join(
            f"{part} {human_count(count)} ({count / found.parameters:.0%})" for part, count in found.parts.items()
        ),
        "blocks": f"{found.blocks}, {span} parameters each; "
        + (f"all stay: {found.block.stay}" if found.block.stay else "whole ones can go (--recipe depth)"),
        "FLOPs": f"{human_count(found.flops)} for one {sample}",
    }
    facts["kinds"] = "; ".join(f"{spaces} in {name_blocks(blocks)}" for spaces, blocks in found.kinds.items())
    if found.cache:
        facts["KV cache"] = f"{human_bytes(found.cache)} a token"
    if found.ignored_words is not None:
        facts["not loaded"] = f"{found.ignored_words}; outputs lack them"
    if found.tied_words is not None:
        facts["tied"] = found.tied_words
    if found.made_from is not None:
        facts["made from"] = f"{found.made_from.source} by recipe {found.made_from.recipe}"
    for key, value in facts.items():
        if value:
            click.echo(f"{key:<11} {value}")
    columns = ["space", "units per block", "parameters", "container", "with a bias"]
    spaces = [
        [
            name,
            f"{space.units} x {space.unit}{_in_steps(space)}",
            human_count(space.parameters),
            *space.containers.values(),
        ]
        for name, space in found.spaces.items()
    ]
    click.echo(f"\n{print_table(Table(columns, spaces))}")
    for name, space in found.spaces.items():
        if space.whole is not None:
            click.echo(f"{name}: whole, {space.whole}")
    if found.found is not None:
        _print_proofs(found.found)
    if found.sparsity is not None:
        _print_sparsity(found.sparsity)
    if found.pruned:
        shrinks = any(size.cache != found.cache for size in found.pruned)
        rows = [
            {
                "ratio": "own" if size.ratio is None else f"{size.ratio:g}",
                **{space: str(units) for space, units in size.units.items()},
                "parameters": f"{size.parameters:,}",
                "bytes": human_bytes(size.bytes),
                "FLOPs": human_count(size.flops),
                **({"KV cache / token": human_bytes(size.cache or 0)} if shrinks else {}),
                "container": size.container,
            }
            for size in found.pruned
        ]
        click.echo(f"\nby recipe {found.recipe}:\n{table_of(rows)}")
        for line in found.messages:
            click.echo(line)


command = Command(
    inspect,
    _show,
    examples=[
        "inspect MODEL --ratio 0.1,0.2,0.3",
        "inspect VIT --recipe corp --ratio 0.5",
        "inspect VIT --recipe corp-table8",
        "inspect OUT --sparsity",
    ],
)
