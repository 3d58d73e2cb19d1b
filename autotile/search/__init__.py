"""The search: samplers for Optuna that propose the valid configurations of a search space, each at most once.

docs/search.md says which module does what. The package re-exports nothing, so that a program that lists the samplers
does not load Optuna.
"""
