"""A graph in the place of a checkpoint: which one a name means."""

from pathlib import Path

from ckpt_prune.common.errors import UserError

SUFFIX = ".onnx"


def graph_named(name: str) -> Path | None:
    """The graph that a name means, this tool's or another's; None where it means something else.

    Args:
        name: a graph, beside config.json and tokenizer or image processor; or a folder with one and no checkpoint.

    Raises:
        UserError: there is no such graph, or the folder has several.
    """
    path = Path(name)
    if path.suffix == SUFFIX and not path.is_dir():
        if not path.is_file():
            raise UserError(f"{name}: there is no such graph")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise UserError(f"{name} holds {len(found)} graphs: give one of them, such as {found[0]}")
    return found[0] if found else None
