"""Results as files: recordings, bundles, T4, Kernel Tuner, C++ headers."""
