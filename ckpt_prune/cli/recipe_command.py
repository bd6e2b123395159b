"""`ckpt-prune recipe`."""

from pathlib import Path

import click

from ckpt_prune.cli.options import echo_json, json_option, public_option


@click.group("recipe")
def command() -> None:
    """List, show, copy, validate and share recipes."""


@command.command("list")
@click.option("--papers", is_flag=True, help="List the recipes of papers, and those that compare one choice.")
@click.option("--all", "every", is_flag=True, help="List every shipped recipe.")
@json_option
def list_recipes(papers: bool, every: bool, as_json: bool) -> None:
    """List recipes by what they are for: a dozen to choose from.

    time is what pruning takes, as a multiple of recipe ridge. loads with: stock is a class of transformers; own code is
    `ckpt_prune.load(OUT)`, or trust_remote_code=True without this package. data is what prune needs beside the model:
    --text, --images for a vision model, or --statistics; any one of those named is enough.
    """
    from ckpt_prune.cli.recipe_listing import first_list, long_list, recipe_data
    from ckpt_prune.recipe.catalogue import grouped
    from ckpt_prune.recipe.reading import load_recipe
    from ckpt_prune.recipe.shipped import shipped_recipes

    groups = grouped(load_recipe(file) for file in shipped_recipes().values() if every or file.is_first != papers)
    if as_json:
        echo_json([recipe_data(entry) for entries in groups.values() for entry in entries])
        return
    click.echo("\n".join((long_list if papers or every else first_list)(groups)))


@command.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe file, comments included, and what each of its keys means.

    NAME is what --recipe takes: a shipped name, a file, ORG/REPO/NAME.yaml[@REVISION] on the Hub, or an https address.
    """
    from ckpt_prune.cli.recipe_listing import explain
    from ckpt_prune.recipe.places import locate_recipe
    from ckpt_prune.recipe.shipped import recipe_text

    click.echo(explain(recipe_text(locate_recipe(name))), nl=False)


@command.command("copy")
@click.argument("name")
@click.argument("destination", type=click.Path(path_type=Path), required=False)
def copy(name: str, destination: Path | None) -> None:
    """Copy a recipe to DESTINATION (default: NAME.yaml here), to edit and pass to --recipe."""
    from ckpt_prune.checkpoint.files import check_place
    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.common.errors import UserError
    from ckpt_prune.recipe.places import locate_recipe
    from ckpt_prune.recipe.shipped import recipe_text

    source = locate_recipe(name)
    target = destination or Path(f"{source.name}.yaml")
    if target.is_dir():
        target = target / f"{source.name}.yaml"
    if target.exists():
        raise UserError(f"{target} exists: choose another name")
    check_place(target)
    write_atomically(target, recipe_text(source))
    click.echo(str(target))


@command.command("validate")
@click.argument("file")
@json_option
def validate(file: str, as_json: bool) -> None:
    """Check a recipe FILE; with --json, print it with every default spelt out."""
    from ckpt_prune.recipe.reading import load_recipe

    recipe = load_recipe(file)
    if as_json:
        echo_json(recipe.model_dump(mode="json", by_alias=True))
        return
    click.echo(f"{file}: recipe {recipe.name} is valid")


@command.command("push")
@click.argument("file")
@click.argument("repo")
@public_option
@click.option("--overwrite", is_flag=True, help="Replace a recipe of this name in REPO.")
@json_option
def push(file: str, repo: str, public: bool, overwrite: bool, as_json: bool) -> None:
    """Share a recipe FILE in the Hub's repository REPO (ORG/NAME).

    The repository is made where there is none: private, unless --public. The recipe is checked first. What is printed
    is what others give to --recipe for just this file.
    """
    from ckpt_prune.hub.recipes import push_recipe

    reference, done = push_recipe(file, repo, public=public, overwrite=overwrite)
    if as_json:
        echo_json({"reference": reference, "url": done.url})
        return
    kind = "public" if public else "private"
    click.echo(f"pushed {Path(file).name} to {done.url} ({kind}): --recipe {reference}")


@command.command("schema")
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from ckpt_prune.recipe.reading import json_schema

    echo_json(json_schema())
