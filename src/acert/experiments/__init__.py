"""Experiments: recipes, runs and their folders, overrides from the command line."""
