"""`ckpt-prune push`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import push
from ckpt_prune.cli.command import Command, table_of

if TYPE_CHECKING:
    from ckpt_prune.runner.push import Pushed


def pushed_lines(pushed: "Pushed", *, files: bool) -> list[str]:
    """Describe what was pushed, or would be; with `files`, list every file."""
    from ckpt_prune.common.formatting import human_bytes, plural

    lines = [table_of([{"file": name, "bytes": str(size)} for name, size in pushed.files.items()])] if files else []
    lines += [f"removed there: {name}" for name in pushed.removed]
    if pushed.left_out:
        lines.append(f"not pushed, as this tool did not write it: {', '.join(pushed.left_out)}")
    total = f"{plural(len(pushed.files), 'file')}, {human_bytes(sum(pushed.files.values()))}"
    kind = "public" if pushed.public else "private"
    if pushed.url is None:
        return [*lines, f"{total}, for {pushed.repo} ({kind}): everything checked, nothing uploaded"]
    return [*lines, f"pushed {total} to {pushed.url} ({kind}), commit {pushed.commit}"]


def _show(pushed: "Pushed", _options: dict[str, Any]) -> None:
    click.echo("\n".join(pushed_lines(pushed, files=True)))


command = Command(
    push,
    _show,
    examples=[
        "push OUT ORG/NAME --dry-run",
        "evaluate OUT --against MODEL --text held_out.txt --window 512 --json > figures.json",
        "push OUT ORG/NAME --base-model ORG/DENSE --evaluation wikitext=figures.json",
    ],
)
