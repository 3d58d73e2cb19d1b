"""What outlives a run: the tuning database, recordings of whole spaces, and exchange with Kernel Tuner.

================================ ====================================================================
`autotile.store.keys`            what a result belongs to: `TuningKey`, `space_hash`, `differences`
`autotile.store.database`        `Database`: open, write each trial as it ends, read the best back
`autotile.store.trials`          a `Trial` as a row of the database, and back
`autotile.store.best`            the best result of each study, from the SQL view ``best``
`autotile.store.schema`          the tables; ``migrations`` holds the steps that lead to them
`autotile.store.recording`       one file that holds a whole measured space, for replay without a GPU
`autotile.store.t4`              export in the auto-tuning community's T4 format
`autotile.store.kernel_tuner_cache` Kernel Tuner's cache files, written and read
================================ ====================================================================

The package re-exports nothing, so that a program that needs only a key does not pay for loading SQLAlchemy.
"""
