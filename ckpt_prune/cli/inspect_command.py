"""`ckpt-prune inspect`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import checked_recipe, echo_json, json_option, model_argument, table


@click.command("inspect")
@model_argument
@click.option(
    "--ratio",
    "ratios",
    metavar="R[,R...]",
    help="Also print the size after dropping these shares of the units of a recipe's spaces.",
)
@click.option(
    "--recipe",
    callback=checked_recipe,
    default="rcpu",
    show_default=True,
    metavar="R",
    help="Recipe whose spaces and rounding --ratio applies to: rcpu drops heads and mlp columns, corp dimensions of q "
    "and k and mlp columns.",
)
@click.option(
    "--sparsity",
    is_flag=True,
    help="Also count the zeros of the linear weights, and say which of 1:4, 2:4 and 4:8 they hold. Reads all weights.",
)
@json_option
def command(model: str, ratios: str | None, recipe: str, sparsity: bool, as_json: bool) -> None:
    """Say what MODEL is: family, spaces and their widths, sizes, and the containers a pruned copy would fit.

    Reads the config and the headers of the weights only, unless asked for --sparsity. A folder with nothing but a
    config.json will do, for counting.

    \b
      ckpt-prune inspect MODEL --ratio 0.1,0.2,0.3
      ckpt-prune inspect VIT --recipe corp --ratio 0.5
      ckpt-prune inspect OUT --sparsity
    """
    from ckpt_prune.architectures.hypothetical import checkpoint_of_config, is_config_only
    from ckpt_prune.containers.opening import open_checkpoint
    from ckpt_prune.containers.remote import remote_class
    from ckpt_prune.errors import UserError
    from ckpt_prune.report.reading import report_of

    folder = Path(model)
    config_only = folder.is_dir() and is_config_only(folder)
    if config_only and sparsity:
        raise UserError(f"{model} has a config.json and no weights: --sparsity counts zeros in weights; leave it out")
    checkpoint = checkpoint_of_config(folder) if config_only else open_checkpoint(model, trust=True)
    remote = remote_class(checkpoint.config, checkpoint.path)
    if remote is not None and not _parse_ratios(ratios):
        report, show = _describe_remote(checkpoint, remote), _print_remote
    else:
        report, show = _describe(checkpoint), _print
        report["weights"] = not config_only
        made = report_of(checkpoint.path)
        report["made_from"] = {"source": made.source.name, "recipe": made.recipe.name} if made else None
        _recipe(recipe, 0.0)
        report["pruned"] = [_size_at(checkpoint, recipe, ratio) for ratio in _parse_ratios(ratios)]
        report["messages"] = [line for pruned in report["pruned"] for line in pruned.pop("messages")]
        report["recipe"] = recipe if report["pruned"] else None
    if sparsity:
        report["sparsity"] = _sparsity(checkpoint)
    if as_json:
        echo_json(report)
    else:
        show(report)


def _parse_ratios(text: str | None) -> list[float]:
    from ckpt_prune.errors import UserError
    from ckpt_prune.planning.fields import percent_meant, share_of

    found = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        try:
            value = float(part) if (share := share_of(part)) is None else share
        except ValueError:
            raise UserError(f"--ratio {part}: expected numbers, for example 0.1,0.2,0.3") from None
        if not 0 <= value < 1:
            raise UserError(f"--ratio {part}: a ratio is in [0, 1){percent_meant(value)}")
        found.append(value)
    return found


def _recipe(name: str, ratio: float) -> Any:
    from ckpt_prune.errors import UserError
    from ckpt_prune.planning.recipe_file import load_recipe

    if load_recipe(name).mask is not None:
        raise UserError(f"recipe {name} zeroes weights and leaves every size as it is: --ratio is for one with spaces")
    # Whatever holds the shape: sizes are asked for, not a refusal.
    return load_recipe(name, ("container=any",), ratio)


def _size_at(checkpoint: Any, recipe: str, ratio: float) -> dict[str, Any]:
    from ckpt_prune.architectures.model import Model
    from ckpt_prune.cli.rendering import coarse_lines
    from ckpt_prune.transform.checks import check_spaces
    from ckpt_prune.transform.decisions import Decisions
    from ckpt_prune.transform.output import output_of
    from ckpt_prune.transform.request import Request

    model, loaded = Model.of(checkpoint), _recipe(recipe, ratio)
    check_spaces(model.family, loaded)
    widths = Decisions(loaded).widths(model)
    output = output_of(Request(model, loaded), widths)
    container = output.container
    return {
        "ratio": ratio,
        "units": dict(widths[0]),
        "container": container.model_type + (" + remote code" if container.remote_class else ""),
        **output.cost.model_dump(),
        "messages": list(coarse_lines(model, loaded)),
    }


def _describe(checkpoint: Any) -> dict[str, Any]:
    from ckpt_prune.architectures.model import Model
    from ckpt_prune.containers.checking import check_source
    from ckpt_prune.containers.choosing import choose_container
    from ckpt_prune.errors import UserError
    from ckpt_prune.planning.accounting import cost_of

    model = Model.of(checkpoint)
    family = model.family
    check_source(model)
    existing = {module for module in family.linears if model.has(module, "bias")}
    spaces = {}
    for name, description in family.spaces.items():
        units = model.units(name)
        per_block = sum(checkpoint.tensors[model.tensor(0, module)].numel for module in description.modules)
        fits = {}
        columns = family.columns.get(name)
        consumer = None if columns is None else columns.consumer
        for label, biases in (
            ("weights", existing),
            ("weights and bias", existing | ({consumer} if consumer else set())),
        ):
            try:
                # One unit fewer stands for any number: the first drop is what changes the container.
                widths = [{name: max(1, units - 1)}] * model.blocks
                fits[label] = choose_container(model, widths, biases).model_type
            except UserError:
                fits[label] = "remote code"
        spaces[name] = {
            "unit": description.unit,
            "units": units,
            "consumer": consumer,
            "columns_per_unit": model.unit_columns(name),
            "parameters": per_block * model.blocks,
            "containers": fits,
        }
    return {
        "model": str(checkpoint.path),
        "family": family.model_type,
        "architecture": family.architecture,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "files": len(checkpoint.files),
        "blocks": model.blocks,
        "tied_head": model.tied,
        "spaces": spaces,
        **cost_of(model).model_dump(),
    }


def _describe_remote(checkpoint: Any, remote: str) -> dict[str, Any]:
    """What an output with remote code is: it cannot be pruned again, so only its size and what it was made from."""
    from ckpt_prune.architectures.family import family_of
    from ckpt_prune.report.reading import report_of

    made = report_of(checkpoint.path)
    return {
        "model": str(checkpoint.path),
        "family": family_of(checkpoint.config).model_type,
        "architecture": remote,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "files": len(checkpoint.files),
        "parameters": sum(info.numel for info in checkpoint.tensors.values()),
        "bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
        "flops": made and made.after.flops,
        "tokens": made and made.after.tokens,
        "source": made and made.source.name,
        "recipe": made and made.recipe.name,
        "note": made and made.container.note,
    }


def _sparsity(checkpoint: Any) -> dict[str, Any]:
    """Zeros of every tensor, and of the blocks' linear weights by module and together."""
    from ckpt_prune.architectures.fitting import fitting_family
    from ckpt_prune.sparsity.zeros import find_zeros, pattern_of_all, share_of_all, weights_by_module

    family = fitting_family(checkpoint)
    found = {each.name: each for each in find_zeros(checkpoint)}
    modules = {
        module: [found[name] for name in names]
        for module, names in weights_by_module(checkpoint.tensors, family.block, family.linears).items()
    }

    def together(tensors: list[Any]) -> dict[str, Any]:
        return {
            "tensors": len(tensors),
            "weights": sum(each.numel for each in tensors),
            "zeros": sum(each.zeros for each in tensors),
            "min": min((each.share for each in tensors), default=0.0),
            "mean": share_of_all(tensors),
            "max": max((each.share for each in tensors), default=0.0),
            "pattern": pattern_of_all(tensors),
        }

    return {
        "modules": {module: together(tensors) for module, tensors in modules.items()},
        "blocks": together([each for tensors in modules.values() for each in tensors]),
        "tensors": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "zeros": each.zeros,
                "share": each.share,
                "pattern": each.pattern,
            }
            for each in found.values()
        ],
    }


def _print_sparsity(found: dict[str, Any]) -> None:
    from ckpt_prune.checkpoint.units import human_count

    rows = [
        [
            name,
            str(row["tensors"]),
            human_count(row["weights"]),
            *(f"{row[key]:.1%}" for key in ("min", "mean", "max")),
            row["pattern"] or "-",
        ]
        for name, row in [*found["modules"].items(), ("all", found["blocks"])]
    ]
    click.echo()
    click.echo("zeros in the linear weights of the blocks; pattern: N:M, held in every group of all the tensors:")
    click.echo(table(["module", "tensors", "weights", "min", "mean", "max", "pattern"], rows))


def _print_remote(report: dict[str, Any]) -> None:
    from ckpt_prune.checkpoint.units import human_bytes, human_count

    facts = {
        "model": report["model"],
        "family": f"{report['family']} ({report['architecture']}, remote code of this tool)",
        "weights": f"{report['dtype']}, {human_bytes(report['bytes'])} in {report['files']} file(s)",
        "parameters": human_count(report["parameters"]),
        "FLOPs": report["flops"] and f"{human_count(report['flops'])} for one sample of {report['tokens']} tokens",
        "made from": report["source"] and f"{report['source']} by recipe {report['recipe']}",
        "container": report["note"],
    }
    for key, value in facts.items():
        if value:
            click.echo(f"{key:<11} {value}")
    click.echo("\nit cannot be pruned or measured again: start from the dense model")
    if "sparsity" in report:
        _print_sparsity(report["sparsity"])


def _print(report: dict[str, Any]) -> None:
    from ckpt_prune.checkpoint.units import human_bytes, human_count

    facts = {
        "model": report["model"] + ("" if report["weights"] else " (config only)"),
        "family": f"{report['family']} ({report['architecture']})",
        "weights": f"{report['dtype']}, {human_bytes(report['bytes'])} in {report['files']} file(s)",
        "parameters": human_count(report["parameters"]) + (", tied head" if report["tied_head"] else ""),
        "blocks": str(report["blocks"]),
        "FLOPs": f"{human_count(report['flops'])} for one sample of {report['tokens']} tokens",
    }
    if report["made_from"]:
        facts["made from"] = f"{report['made_from']['source']} by recipe {report['made_from']['recipe']}"
    for key, value in facts.items():
        click.echo(f"{key:<11} {value}")
    rows = [
        [
            name,
            f"{s['units']} x {s['unit']}",
            human_count(s["parameters"]),
            s["containers"]["weights"],
            s["containers"]["weights and bias"],
        ]
        for name, s in report["spaces"].items()
    ]
    click.echo()
    click.echo(table(["space", "units per block", "parameters", "container", "with a bias"], rows))
    if "sparsity" in report:
        _print_sparsity(report["sparsity"])
    if report["pruned"]:
        spaces = list(report["pruned"][0]["units"])
        rows = [
            [
                f"{p['ratio']:g}",
                *(str(p["units"][s]) for s in spaces),
                f"{p['parameters']:,}",
                human_bytes(p["bytes"]),
                human_count(p["flops"]),
                p["container"],
            ]
            for p in report["pruned"]
        ]
        click.echo()
        click.echo(f"by recipe {report['recipe']}:")
        click.echo(table(["ratio", *spaces, "parameters", "bytes", "FLOPs", "container"], rows))
        for line in report["messages"]:
            click.echo(line)
