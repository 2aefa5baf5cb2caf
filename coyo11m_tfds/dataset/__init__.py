"""What lies on disk, and the one opener of it: records, chunk index, columns, checksums."""
