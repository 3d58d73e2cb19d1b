"""The pure part: values, spaces, limits and statistics. No GPU, no files, no processes."""
