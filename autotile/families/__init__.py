"""Families of problems and their rules: point selection, features, tree learning, time model."""
