"""Families as data, and models without weights."""
