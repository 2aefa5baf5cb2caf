"""A process: its command line, cores and memory, job, workers, progress, and how it ends."""
