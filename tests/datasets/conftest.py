"""The command line's model on disk and its Hub."""

from tests.cli.conftest import hub, made, place

__all__ = ["hub", "made", "place"]
