"""Programs about a run: what a pod would do, what limits a run, whether a configuration fits."""
