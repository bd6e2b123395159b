"""Help and version: every command says what it takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from ckpt_prune import __version__
from ckpt_prune.api.commands import prune
from ckpt_prune.api.function import group_of
from ckpt_prune.cli.command import Command
from ckpt_prune.cli.main import main
from ckpt_prune.common.graph_types import MixedGgufType
from ckpt_prune.options.option import check_options, flags_of, shell_of
from tests.cli.running import ok, run


def list_commands(group: click.Group, name: str = "") -> Iterator[tuple[str, Command]]:
    for subcommand in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), subcommand)
        if isinstance(command, click.Group):
            yield from list_commands(command, f"{name}{subcommand} ")
        else:
            assert isinstance(command, Command)
            yield f"{name}{subcommand}", command


EVERY = dict(list_commands(main))
every_command = pytest.mark.parametrize("name", EVERY)


@every_command
def test_help_explains_every_option_in_its_group(name):
    page = ok(*name.split(), "-h")
    assert page.startswith(f"Usage: main {name}")
    letters = re.sub(r"[\s-]", "", page)
    for option, field in EVERY[name].options.model_fields.items():
        if not shell_of(field).shown:
            continue
        assert re.sub(r"[\s-]", "", str(field.description)) in letters
        if field.kw_only is not False:
            assert flags_of(option, field)[-1] in page
            assert f"\n{group_of(EVERY[name].options, option)}:\n" in page


@every_command
def test_help_leaves_out_what_only_python_gets(name):
    page = ok(*name.split(), "-h")
    assert not re.search(r"^  (Returns|Raises) ", page, re.MULTILINE)
    assert "Raises" in str(prune.__doc__)


@every_command
def test_examples_parse(name):
    """Texts and models are not looked for."""
    for place in ("OUT", "photos", "labels.csv"):
        Path(place).mkdir()
    assert len(EVERY[name].examples) >= 2
    for line in EVERY[name].examples:
        words = shlex.split(line.partition(" > ")[0])
        if words[: len(name.split())] != name.split():
            continue  # push shows how its figures are made
        given = EVERY[name].make_context(name, words[len(name.split()) :]).params
        given.pop("as_json", None)
        check_options(EVERY[name].options, {key: value for key, value in given.items() if value not in (None, ())})


def test_the_types_of_files_that_are_named_are_those_that_are_listed():
    page = " ".join(ok("export", "-h").split())
    listed = re.search(r"--dtype \[([^]]+)\]", page)[1].split("|")
    named, first, last = re.search(r"For gguf (.+?), or a mixture .* listed from (\w+) to (\w+)\.", page).groups()
    mixtures = listed[listed.index(first) : listed.index(last) + 1]
    assert [*named.split(", "), *mixtures] == listed[listed.index("f32") :]
    assert mixtures == list(get_args(MixedGgufType))


def test_version():
    lines = ok("--version").splitlines()
    assert lines[0] == f"ckpt-prune {__version__}"
    assert {line.split()[0] for line in lines} >= {"ckpt-prune", "torch", "transformers"}


def test_help_fits_a_screen_and_names_the_first_four_first():
    lines = ok("--help").splitlines()
    assert (len(lines) <= 48, max(map(len, lines)) <= 80) == (True, True)
    first = lines.index("The four to start with:")
    assert [line.split()[0] for line in lines[first + 1 : first + 5]] == ["prune", "verify", "evaluate", "export"]


def test_no_command_shows_the_help():
    result = run()
    assert result.exit_code == 2
    assert result.output == ok("-h")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("pru", "prune"), ("recover --meth", "--method"), ("statistics a", "add"), ("sta", "statistics")],
)
def test_a_shell_completes_words(typed, offered):
    """By click's own script, which README.md says how to load."""
    words = f"ckpt-prune {typed}"
    environment = {"_CKPT_PRUNE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(main, prog_name="ckpt-prune", env=environment)
    assert result.output == f"plain,{offered}\n"
