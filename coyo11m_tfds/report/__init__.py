"""The statistics of a build, and its report."""
