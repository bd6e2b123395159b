"""`ckpt-prune recipe`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.function import takes
from ckpt_prune.cli.command import Command, echo_json
from ckpt_prune.common.errors import UserError
from ckpt_prune.options.commands import (
    RecipeCopyOptions,
    RecipeListOptions,
    RecipeNameOptions,
    RecipePushOptions,
    RecipeValidateOptions,
)
from ckpt_prune.options.option import Options
from ckpt_prune.recipe.shipped import recipe_text, shipped_recipes

if TYPE_CHECKING:
    from ckpt_prune.recipe.catalogue import Entry
    from ckpt_prune.recipe.names import Goal
    from ckpt_prune.recipe.recipe import Recipe

    Groups = Mapping[Goal, Sequence[Entry]]


@takes(RecipeListOptions)
def list_recipes(options: RecipeListOptions) -> "Groups":
    """List recipes by what they are for: a dozen to choose from.

    time is what pruning takes, as a multiple of recipe ridge. loads with: stock is a class of transformers; own code is
    `ckpt_prune.load(OUT)`, or trust_remote_code=True without this package. data is what prune needs besides the model:
    --text, --images for a vision model, or --statistics. Where several are named, one is enough; any means all three.
    """
    from ckpt_prune.recipe.catalogue import group_recipes
    from ckpt_prune.stages.recipe_files import load_recipe

    files = shipped_recipes().values()
    return group_recipes(load_recipe(file) for file in files if options.all or file.is_first != options.papers)


def _list_data(groups: "Groups") -> list[dict[str, Any]]:
    from ckpt_prune.cli.recipe_listing import recipe_data

    return [recipe_data(entry) for entries in groups.values() for entry in entries]


def _show_list(groups: "Groups", options: dict[str, Any]) -> None:
    from ckpt_prune.cli.recipe_listing import first_list, long_list

    click.echo("\n".join((long_list if options.get("papers") or options.get("all") else first_list)(groups)))


@takes(RecipeNameOptions)
def show(options: RecipeNameOptions) -> str:
    """Print a recipe file, comments included, and what each of its keys means."""
    from ckpt_prune.cli.recipe_listing import explain
    from ckpt_prune.recipe.places import locate_recipe

    file = locate_recipe(options.name)
    return explain(recipe_text(file), file.path)


@takes(RecipeCopyOptions)
def copy(options: RecipeCopyOptions) -> Path:
    """Copy a recipe, to edit it and pass it to --recipe."""
    from ckpt_prune.checkpoint.files import check_place
    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.recipe.places import locate_recipe

    source = locate_recipe(options.name)
    target = options.destination or Path(f"{source.name}.yaml")
    if target.is_dir():
        target = target / f"{source.name}.yaml"
    if target.exists():
        raise UserError(f"{target} exists: choose another name")
    check_place(target)
    write_atomically(target, recipe_text(source))
    return target


@takes(RecipeValidateOptions)
def validate(options: RecipeValidateOptions) -> "dict[str, Recipe]":
    """Check recipes; with --json, print them with every default spelt out: of several, an object by the names given."""
    from ckpt_prune.stages.recipe_files import load_recipe

    recipes, faults = {}, []
    for name in options.names:
        try:
            recipes[name] = load_recipe(name)
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("; ".join(faults))
    return recipes


def _show_valid(recipes: "Mapping[str, Recipe]", _options: dict[str, Any]) -> None:
    for name, recipe in recipes.items():
        click.echo(f"{name}: recipe {recipe.name} is valid")


def _recipes_data(recipes: "Mapping[str, Recipe]") -> dict[str, Any]:
    data = {name: recipe.model_dump(mode="json", by_alias=True) for name, recipe in recipes.items()}
    return data if len(data) > 1 else next(iter(data.values()))


@takes(RecipePushOptions)
def push(options: RecipePushOptions) -> dict[str, str]:
    """Share a recipe FILE in the Hub's repository REPO: private, unless --public is given.

    The recipe is checked first. What is printed is what others give to --recipe for just this file.
    """
    from ckpt_prune.hub.recipes import push_recipe

    reference, pushed = push_recipe(options.file, options.repo, public=options.public, overwrite=options.overwrite)
    return {"reference": reference, "url": pushed.url}


def _show_push(pushed: dict[str, str], options: dict[str, Any]) -> None:
    kind = "public" if options.get("public") else "private"
    click.echo(f"pushed {Path(options['file']).name} to {pushed['url']} ({kind}): --recipe {pushed['reference']}")


@takes(Options)
def schema(options: Options) -> dict[str, Any]:
    """Print the JSON Schema of recipes, for editors."""
    from ckpt_prune.stages.recipe_files import json_schema

    return json_schema()


command = click.Group(
    "recipe",
    [
        Command(
            list_recipes,
            _show_list,
            examples=["recipe list", "recipe list --papers"],
            data=_list_data,
            name="list",
        ),
        Command(
            show,
            lambda text, _: click.echo(text, nl=False),
            examples=["recipe show rcpu", "recipe show mine.yaml"],
            data=None,
        ),
        Command(
            copy,
            lambda target, _: click.echo(str(target)),
            examples=["recipe copy rcpu", "recipe copy rcpu mine.yaml"],
            data=None,
        ),
        Command(
            validate,
            _show_valid,
            examples=["recipe validate mine.yaml yours.yaml", "recipe validate ridge --json"],
            data=_recipes_data,
        ),
        Command(
            push,
            _show_push,
            examples=["recipe push mine.yaml ORG/RECIPES", "recipe push mine.yaml ORG/RECIPES --public"],
            data=dict,
        ),
        Command(
            schema,
            lambda schema, _: echo_json(schema),
            examples=["recipe schema", "recipe schema > recipe.schema.json"],
            data=None,
        ),
    ],
    help="List, show, copy, validate and share recipes.",
)
