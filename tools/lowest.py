"""Print constraints for pip: of what this package needs the oldest versions that pyproject.toml allows.

    python tools/lowest.py [NAME ...] > lowest.txt

What only the tests need is as in constraints.txt, and so are the packages that are named; what neither file names, pip
chooses.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BOUND = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)(?:,<[0-9.]+)?(.*)")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==")


def lowest(requirements: Iterable[str]) -> dict[str, str]:
    """Name of each requirement with a lower bound → its oldest version as a constraint, markers kept."""
    versions = {}
    for requirement in requirements:
        bound = _BOUND.fullmatch(requirement)
        if bound is not None:
            versions[normal(bound[1])] = f"{bound[1]}=={bound[2]}{bound[3]}"
    return versions


def normal(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(kept: Iterable[str] = (), root: Path = ROOT) -> list[str]:
    """All lines; the packages `kept` are as in constraints.txt."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    extra_names = {name for name in extras if name != "dev"}
    oldest = lowest(
        [*project["dependencies"], *(requirement for name in sorted(extra_names) for requirement in extras[name])]
    )
    for name in kept:
        del oldest[normal(name)]
    # Any other pin would keep what is older from being taken.
    testing = {normal(re.split(r"[\[<>=;]", requirement)[0]) for requirement in extras["dev"]} - oldest.keys() | {
        *map(normal, kept)
    }
    pins = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [*oldest.values(), *(line for line in pins if (pin := _PIN.match(line)) and normal(pin[1]) in testing)]


if __name__ == "__main__":
    print("\n".join(constraints(sys.argv[1:])))
