"""The tuning database: studies, trials, best results, misses, families, migrations."""
