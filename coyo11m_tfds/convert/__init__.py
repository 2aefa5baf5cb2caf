"""Builds a data set: plans tasks, runs them in processes or with Beam, and publishes them."""
