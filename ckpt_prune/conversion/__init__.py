"""Vision transformers of other libraries, written as the stock class that computes the same (README.md)."""
