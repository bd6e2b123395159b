"""How many blocks and dimensions to drop where units of spaces go too: a few counts are tried and measured."""
