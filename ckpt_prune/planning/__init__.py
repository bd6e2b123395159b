"""Recipes, selection, the plan file and predicted sizes."""
