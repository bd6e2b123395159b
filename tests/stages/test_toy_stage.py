"""A stage appears wherever stages are spoken of by its own folder and two lines in STAGES alone."""

import json
import runpy
import sys
from pathlib import Path

import ckpt_prune
from tests.forked import posix, run_forked

SCRIPT = Path(__file__).parent / "toy" / "run_with_scale.py"
MODEL = str(Path(ckpt_prune.__file__).parent / "demo" / "model")
RECIPE = """\
version: 1
name: mine
ratio: 0.5
spaces: {mlp: {score: magnitude, compensation: {method: none}}}
scale: {factor: 3}
"""


def run_anew(*arguments: str) -> None:
    """Run the script as a new Python does, but for what others' packages cost to import."""
    for name in [each for each in sys.modules if each.partition(".")[0] in ("ckpt_prune", "tests")]:
        del sys.modules[name]
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@posix
def test_a_stage_is_its_folder_and_two_lines(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    prune = ["prune", MODEL, "--recipe", "mine.yaml", "-o", "out"]
    lines = {
        "schema": ["recipe", "schema"],
        "keys": ["recipe", "show", "mine.yaml"],
        "refusal": ["prune", MODEL, "--recipe", "mine.yaml", "--set", "scale.factor=-1", "-o", "no"],
        "dry run": [*prune, "--dry-run"],
        "plan": ["plan", MODEL, "--recipe", "mine.yaml"],
        "prune": prune,
        "verify": ["verify", "out", "--against", MODEL],
        "page": ["report", "out", "-o", "page.html"],
    }
    done = run_forked(lambda: run_anew(str(tmp_path / "stages.py"), json.dumps([*lines.values()])), tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))
    shown = {name: text for name, (_, text) in outputs.items()}
    assert {name for name, (code, _) in outputs.items() if code} == {"refusal"}, outputs
    assert "What it is multiplied by." in shown["schema"]
    assert "scale.factor" in shown["refusal"]
    assert "to be scaled: " in shown["dry run"]
    assert "a scaled mlp is a toy" in shown["dry run"]
    assert "the mlp is scaled by 3 afterwards" in shown["plan"]
    assert "weights were scaled by 3." in shown["prune"]
    assert "scaled weights are there" in shown["verify"]
    assert "dense rows, bit for bit; 6 tensors that other stages changed and not compared" in shown["verify"]
    written = {name: (tmp_path / name).read_text(encoding="utf-8") for name in ("out/README.md", "page.html")}
    assert all("weights were scaled by 3." in text for text in written.values())
    report = json.loads((tmp_path / "out" / "ckpt_prune.json").read_text(encoding="utf-8"))
    assert {each["factor"] for each in report["scale"]} == {3.0}
    assert report["recipe"]["scale"] == {"factor": 3.0}
