"""`ckpt-prune push`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.push import Pushed, push
from ckpt_prune.cli.options import echo_json, json_option, public_option, table


@click.command("push")
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("repo")
@public_option
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace what this tool pushed to REPO before. Files that it did not push stay.",
)
@click.option("--base-model", metavar="ID", help="Hub id of the dense model, for the card, where OUT does not say.")
@click.option("--license", metavar="ID", help="Licence for the card, in place of that of the dense model's card.")
@click.option(
    "--evaluation",
    multiple=True,
    metavar="NAME=FILE",
    help="Figures for the card and its model-index: the data's name, and what `evaluate OUT --json` printed; may be "
    "repeated.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything, verify OUT, list files and bytes; upload nothing. It asks the Hub whether REPO can be "
    "written, so it needs a token.",
)
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Share OUT, an output of this tool, as the Hub's repository REPO (ORG/NAME): private, unless --public.

    Only files that this tool wrote are pushed: weights, config, tokenizer, report, model card, licence, and the graph
    in OUT/onnx. OUT is verified first (`ckpt-prune verify`), which loads the whole model; where a check fails nothing
    is pushed. All goes by one commit. The token is that of `hf auth login` or HF_TOKEN.

    \b
      ckpt-prune push OUT ORG/NAME --dry-run
      ckpt-prune evaluate OUT --against MODEL --text held_out.txt --window 512 --json > found.json
      ckpt-prune push OUT ORG/NAME --base-model ORG/DENSE --evaluation wikitext=found.json
    """
    pushed = push(**given)
    if as_json:
        echo_json(pushed.data())
        return
    click.echo("\n".join(pushed_lines(pushed, files=True)))


def pushed_lines(pushed: Pushed, *, files: bool) -> list[str]:
    """What was pushed, or would be.

    Args:
        pushed: the push.
        files: also list every file.
    """
    from ckpt_prune.common.formatting import human_bytes, plural

    lines = [table(["file", "bytes"], [[name, str(size)] for name, size in pushed.files.items()])] if files else []
    lines += [f"removed there: {name}" for name in pushed.removed]
    if pushed.left_out:
        lines.append(f"not pushed, as this tool did not write it: {', '.join(pushed.left_out)}")
    total = f"{plural(len(pushed.files), 'file')}, {human_bytes(sum(pushed.files.values()))}"
    kind = "public" if pushed.public else "private"
    if pushed.url is None:
        return [*lines, f"{total}, for {pushed.repo} ({kind}): everything checked, nothing uploaded"]
    return [*lines, f"pushed {total} to {pushed.url} ({kind}), commit {pushed.commit}"]
