"""The search: samplers for Optuna that propose the valid configurations of a search space, each at most once.

====================================== ===============================================================================
`autotile.search.search`               `Search`: a sampler with its study; `Shortlist`: the candidates that compile,
                                       wait, and are being measured; trials as an Optuna study, in memory or as a file
`autotile.search.samplers`             the samplers by name with their traits: `SAMPLERS`, `make_sampler`
`autotile.search.row_sampler`          `RowSampler`, the base class; the baseline sampler: uniform, or in order
`autotile.search.gp_sampler`           `FeasibleGPSampler`, the default: expected improvement under a Gaussian process
                                       that is kept up to date with the trials
`autotile.search.gaussian_process`     configurations as coordinates; regression, to which observations are added; fits
`autotile.search.transfer`             speeds expected before any trial: from other studies of the kernel, or estimated
`autotile.search.optuna_samplers`      `FeasibleSampler`: any sampler of Optuna; `FeasibleTPESampler`
`autotile.search.installed_strategies` `KernelTunerSampler`: any strategy of Kernel Tuner, in a child process
`autotile.search.importance`           importance of the parameters
====================================== ===============================================================================

The package re-exports nothing, so that a program that lists the samplers does not load Optuna.
"""
