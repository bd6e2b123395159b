"""Discovery: the spaces of a stock class that no family describes, found and proven on a small random twin of it."""
