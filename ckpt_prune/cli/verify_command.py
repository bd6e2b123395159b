"""`ckpt-prune verify`."""

from dataclasses import asdict
from pathlib import Path

import click

from ckpt_prune.cli.options import echo_json, json_option, table


@click.command("verify")
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="MODEL",
    help="The dense model: also check that kept rows, or weights that a mask left, are its own, bit for bit. Of an "
    "exported folder the model that it was exported from.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, folder: Path, against: str | None, as_json: bool) -> None:
    """Prove that OUT is whole: it loads, is finite, agrees with its config and with the digests in ckpt_prune.json.

    Of a masked OUT, the zeros and the pattern that its report states are counted in every weight.

    Of an exported graph, alone or in OUT/onnx, the files, operators and weights, that onnxruntime loads it, and that it
    is the one that validation.json says passed.

    Loads the whole model once. Exit code 1 if a check fails.
    """
    from dataclasses import replace

    from ckpt_prune.checkpoint.hub import resolve
    from ckpt_prune.evaluation.verify import verify
    from ckpt_prune.exporting.session import GRAPH
    from ckpt_prune.exporting.verify import verify_graph
    from ckpt_prune.filenames import GRAPH_FOLDER, GRAPH_RECORD

    dense = resolve(against) if against else None
    holds_graph = (folder / GRAPH).is_file() and not any(folder.glob("*.safetensors"))
    if holds_graph or (folder / GRAPH_RECORD).is_file():
        checks = verify_graph(folder, dense)
    else:
        checks = verify(folder, dense)
        if (folder / GRAPH_FOLDER / GRAPH_RECORD).is_file():
            inside = verify_graph(folder / GRAPH_FOLDER, folder)
            checks += [replace(check, name=f"{GRAPH_FOLDER}: {check.name}") for check in inside]
    passed = all(check.passed is not False for check in checks)
    if as_json:
        echo_json({"passed": passed, "checks": [asdict(check) for check in checks]})
    else:
        words = {True: "ok", False: "FAILED", None: "-"}
        click.echo(table(["check", "result"], [[c.name, words[c.passed]] for c in checks]))
        click.echo()
        for check in checks:
            click.echo(f"{check.name}: {check.detail}")
    ctx.exit(0 if passed else 1)
