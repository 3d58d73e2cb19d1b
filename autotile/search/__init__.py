"""The search: samplers that propose the valid configurations of a search space, each at most once.

docs/search.md says which module does what. The package re-exports nothing: only Optuna's own samplers, and what exports
a study to it, load Optuna.
"""
