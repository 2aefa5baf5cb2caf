"""What a build counts, and the report that tells it."""
