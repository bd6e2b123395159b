"""mask."""
