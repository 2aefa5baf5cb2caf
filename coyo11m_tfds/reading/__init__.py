"""Built data sets, read in the planned order: rows of mapped files, or chunks in requests.

`input_pipeline` is the public interface of this package, and all of it that training imports.
"""
