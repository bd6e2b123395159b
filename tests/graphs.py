"""Tiny models and their graphs, each exported once for all tests of a run; tests copy what they break."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.evaluation.loading import quiet_transformers
from ckpt_prune.export.folder import EMBEDDED_BYTES, GraphWriter
from ckpt_prune.planning.export_recipe import GraphSettings
from tests import encoders, families

Exported = Callable[..., tuple[Path, Path]]


def make(folder: Path, variant: str) -> Path:
    """Save a variant of `tests.families` or `tests.encoders`; where both have the name, that of families."""
    with quiet_transformers():
        return families.make(folder, variant) if variant in families.VARIANTS else encoders.make(folder, variant)


def exports(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """(variant, settings of the graph) → the model's folder and that of its graph, made when first asked for.

    `embedded` says above how many bytes weights go to a file of their own, as in `GraphWriter.write`. Nothing in
    either folder may be changed: copy it. The same for all rooms, whichever asks first.
    """
    return _exports(tmp_path_factory.getbasetemp())


@cache
def _exports(base: Path) -> Exported:
    root = Path(tempfile.mkdtemp(prefix="exports-", dir=base))

    @cache
    def model(variant: str) -> Path:
        return make(root / variant, variant)

    @cache
    def export(variant: str, *, embedded: int = EMBEDDED_BYTES, **settings: Any) -> tuple[Path, Path]:
        out = Path(tempfile.mkdtemp(dir=root)) / variant
        GraphWriter(Checkpoint.open(model(variant)), out, GraphSettings(**settings)).write(embedded=embedded)
        return model(variant), out

    return export
