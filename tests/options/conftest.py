"""The same folders as for the commands."""

from tests.cli.conftest import made, place

__all__ = ["made", "place"]
