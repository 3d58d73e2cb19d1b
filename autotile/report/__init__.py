"""Pages and charts of what a database holds; `autotile.report.study` reads, and needs no charting library."""
