"""Programs about a run: cost on a pod, limit of the speed, check of a configuration."""
