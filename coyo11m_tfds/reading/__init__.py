"""Reads built data sets in the planned order: rows of mapped files, or chunks in requests.

`input_pipeline` is the public interface of this package; training uses only this interface.
"""
