"""Recipe files that tests write, and what the tests make of them."""

from pathlib import Path

from ckpt_prune.stages.recipe_files import load_recipe
from tests import refusals

GOOD = """\
version: 1
name: mine
ratio: 0.3
spaces:
  heads:
    score: rcpu
  mlp:
    score: wanda-sp
    compensation:
      method: ridge
      lambda: 0.1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path, *args) -> str:
    return refusals.refusal(load_recipe, str(path), *args)
