"""spaces."""
