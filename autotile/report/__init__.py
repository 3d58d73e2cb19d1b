"""Pages and charts of what a database holds; `autotile.report.study_data` reads, and needs no charting library."""
