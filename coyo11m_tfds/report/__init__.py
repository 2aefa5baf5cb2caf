"""The report of a build: statistics of the shards, the summary, `report.json` and the page.

Import `summary`, `shard_statistics`, `moments` and `dropped_rows`.
"""
