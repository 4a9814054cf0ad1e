"""Records -> one self-contained HTML file, report.md and report.json.

`build.build` computes a `view.Page` once from records and pure functions of `prefixbench.analysis`; the three writers
only render it, so a figure reads the same wherever it is seen. Nothing here measures or starts anything.
"""
