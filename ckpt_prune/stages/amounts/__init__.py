"""amounts."""
