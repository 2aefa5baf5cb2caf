"""A run from its beginning to its end: rules, checkpoints, log, hosts and signals."""
