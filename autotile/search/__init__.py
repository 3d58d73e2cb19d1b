"""The search: samplers for Optuna that propose the valid configurations of a search space, each at most once.

==================================== =================================================================================
`autotile.search.search`             `Search`: a sampler with its study
`autotile.search.shortlist`          `Shortlist`: the candidates that compile, wait, and are being measured
`autotile.search.samplers`           the samplers by name with their traits: `SAMPLERS`, `make_sampler`
`autotile.search.row_sampler`        `RowSampler`, the base class, and the baseline samplers: uniform, and in order
`autotile.search.gp_sampler`         `FeasibleGPSampler`, the default: expected improvement under a Gaussian process
`autotile.search.gaussian_process`   regression, to which observations are added
`autotile.search.gaussian_process`    their maximum a posteriori fit
`autotile.search.surrogate`          the regression, kept up to date with the trials, and its predictions
`autotile.search.surrogate`             fits that are repeated as trials end
`autotile.search.history`            rows and results of trials, and their losses
`autotile.search.embedding`          configurations as coordinates of the regression
`autotile.search.transfer`           `TransferPrior`: predictions from other studies of the kernel
`autotile.search.optuna_samplers`    `FeasibleSampler`: any sampler of Optuna; `FeasibleTPESampler`
`autotile.search.installed_strategies`         `KernelTunerSampler`: any strategy of Kernel Tuner, in a child process
`autotile.search.study`              trials as an Optuna study, in memory or as a file
`autotile.search.importance`         importance of the parameters
==================================== =================================================================================

The package re-exports nothing, so that a program that lists the samplers does not load Optuna.
"""
