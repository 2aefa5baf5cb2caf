"""Builds a data set: plans tasks, runs them in processes or with Beam, and publishes the result.

`driver` and `settings` are the interface. This package reads `source` and writes through `storage`.
"""
