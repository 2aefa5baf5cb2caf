"""Benchmarks of this project beside its peers; README.md has the commands and the figures."""
