"""Finds and checks the files of a source, and joins captions and other values by key."""
