"""Run command lines, given as JSON, with the stage `scale` in STAGES; print their outputs as JSON."""

import importlib.util
import json
import sys
from pathlib import Path

import ckpt_prune

FOLDER, STAGES = Path(__file__).parent, Path(ckpt_prune.__file__).parent / "stages"
LINE, NAME = "from ckpt_prune.stages.spaces.keys import Spaces\n", "Quantize, Export)"


def add_stage(patched: Path) -> None:
    """Make `ckpt_prune.stages` of its own source with two more lines, and of one more folder."""
    source = (STAGES / "__init__.py").read_text(encoding="utf-8")
    assert source.count(LINE) == source.count(NAME) == 1
    source = source.replace(LINE, f"{LINE}from ckpt_prune.stages.scale.keys import Scale\n")
    patched.write_text(source.replace(NAME, "Quantize,\n    Scale,\n    Export)"), encoding="utf-8")
    folders = [str(STAGES), str(FOLDER)]
    spec = importlib.util.spec_from_file_location("ckpt_prune.stages", patched, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ckpt_prune.stages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    assert "ckpt_prune.stages" not in sys.modules
    add_stage(Path(sys.argv[1]))
    from click.testing import CliRunner

    from ckpt_prune.cli.main import main as command

    results = [CliRunner().invoke(command, line) for line in json.loads(sys.argv[2])]
    # Shipped families pay nothing for the others: no command on a described model imports what looks for spaces.
    assert not [name for name in sys.modules if name.startswith("ckpt_prune.model.discovery")]
    print(json.dumps([[result.exit_code, result.stdout + result.stderr] for result in results]))


if __name__ == "__main__":
    main()
