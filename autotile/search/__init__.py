"""The search: samplers for Optuna, held to the rows of a search space that are valid and were not tried yet.

=============================== ===========================================================================
`autotile.search.search`        `Search`: propose a row, tell its trial, replay what earlier sessions tried
`autotile.search.samplers`      the samplers by name: `make_sampler`, `SAMPLERS`
`autotile.search.gp_sampler`   `FeasibleGPSampler`: expected improvement under a Gaussian process, the default
`autotile.search.surrogate`     the process, kept up with a history of trials; what it expects of rows
`autotile.search.transfer`   what other studies of the kernel let one expect of rows
`autotile.search.kernel_tuner`  strategies of Kernel Tuner as samplers
`autotile.search.importance`    which parameters explain the differences between trials
`autotile.search.optuna_samplers`      `FeasibleSampler`: any Optuna sampler, over the rows of a space only
`autotile.search.optuna_samplers`           `FeasibleTPESampler`: the same, with candidates that are rows to begin with
`autotile.search.row_sampler`        samplers that need no model: uniform, and every row in order
`autotile.search.row_sampler`   `RowSampler`: what they share, among it never proposing a row twice
`autotile.search.optuna_samplers`        the study that a wrapped sampler sees
`autotile.search.row_sampler`    the rows that are left: look-up, uniform choice, nearest
`autotile.search.study`         what an Optuna study is told of each trial
`autotile.search.study`        a study as an SQLite file, for Optuna's plots and its dashboard
=============================== ===========================================================================

The package re-exports nothing, so that a program that lists the samplers does not pay for loading Optuna.
"""
