"""Real models and texts for tests lie in `shared/data` beside the checkout, which is not part of the project."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(*names: str) -> list[Path]:
    """Paths below shared/data; skips the calling test if one of them is not on this machine."""
    paths = [FOLDER / name for name in names]
    for path in paths:
        if not path.exists():
            pytest.skip("the real models and texts of ../shared/data are not on this machine")
    return paths
