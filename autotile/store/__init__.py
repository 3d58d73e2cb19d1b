"""What outlives a run: the tuning database, recordings of whole spaces, and exchange with Kernel Tuner.

====================================== ==============================================================
`autotile.store.keys`                  what a result belongs to: `TuningKey`, `space_hash`
`autotile.store.database`              `Database`: write each trial as it ends, read the best back
`autotile.store.studies`, ``trials``,  the rows behind it, as frozen values
``best``, ``misses``, ``check``
`autotile.store.schema`                the tables; ``migrations`` holds the steps that lead to them
`autotile.store.engine`, ``upgrade``   how a database is found, connected to and brought up to date
`autotile.store.recording`             `Recording`: a measured space, for replay without a GPU
`autotile.store.recording_files`       recordings in folders
`autotile.store.whole_file`            a file is written whole or not at all
`autotile.store.t4`                    export in the auto-tuning community's T4 format
`autotile.store.kernel_tuner_export`,  Kernel Tuner's cache files, written and read
``kernel_tuner_import``
====================================== ==============================================================

The package re-exports nothing, so that a program that needs only a key does not pay for loading SQLAlchemy.
"""
