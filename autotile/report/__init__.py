"""What people look at: pages, charts and comparisons of stored results."""
