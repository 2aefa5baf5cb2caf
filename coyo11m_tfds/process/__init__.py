"""The process: command line, cores and memory, job, workers, progress, and its end."""
