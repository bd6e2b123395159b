"""Recipes, budgets, selection, the plan file and predicted sizes."""
