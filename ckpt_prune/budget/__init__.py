"""Choices under one budget: what each costs and loses, and which of them lose least together."""
