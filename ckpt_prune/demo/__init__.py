"""The small trained model that the package carries, and the text that calibrates and measures it."""
