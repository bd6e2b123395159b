"""rotation."""
