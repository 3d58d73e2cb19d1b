"""What a person reads and what a script parses: each report prints as a thin table and as one JSON document.

========================= =====================================================================
`autotile.report.base`    `Report`: the two faces that every report has
`autotile.report.text`    numbers with their units
`autotile.report.rates`   TFLOP/s and GB/s, in percent of what the device can do
`autotile.report.layout`  the look that all tables share
`autotile.report.listing` `Listing`: rows on one line where they fit, on several where they do not
========================= =====================================================================

Every other module holds the report of one command. The package re-exports nothing.
"""
