"""Bytes of files in memory, mapped or fetched, and what is counted of their reads."""
