"""The same folders as for the commands."""

from tests.cli.conftest import finished, made, place

__all__ = ["finished", "made", "place"]
