"""Sections, and one printer each for the terminal, Markdown and HTML."""
