"""What a person reads and what a script parses: each report prints as a thin table and as one JSON document.

========================= =====================================================================
`autotile.report.base`    `Report`: the two faces that every report has
`autotile.core.text`    numbers with their units
`autotile.kernel.workrate`   TFLOP/s and GB/s, in percent of what the device can do
`autotile.cli.tables`  the look that all tables share
`autotile.cli.tables` `Listing`: rows on one line where they fit, on several where they do not
========================= =====================================================================

Every other module holds the report of one command. The package re-exports nothing.
"""
