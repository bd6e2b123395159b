"""The Python surface: one function for each command, with the same options, the same errors, and results as objects."""
