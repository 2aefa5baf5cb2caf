"""Built data sets, read in the planned order: rows of mapped files, or chunks in requests.

`input_pipeline` is the face of this room, and all that training imports of it.
"""
