"""The stage `depth`: whole blocks are dropped."""
