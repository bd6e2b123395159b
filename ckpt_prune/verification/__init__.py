"""How outputs are compared with what their reports and their sources say."""
