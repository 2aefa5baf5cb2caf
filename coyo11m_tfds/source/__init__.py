"""The source: `.pt` files and Parquet. Finds and checks them; looks captions and rows up by key.

Import any module; the stores share `keyed_store`, `matrix_store` and `keyed_parquet`. Builds and
commands use this room; training does not.
"""
