"""Benchmarks of this project and its peers; README.md has the commands and the figures."""
