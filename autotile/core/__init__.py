"""Plain values and pure functions that everything else uses: dtypes, devices, configurations, outcomes, statistics."""
