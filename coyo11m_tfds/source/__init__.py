"""The source: `.pt` files and Parquet. Finds and checks them; joins captions and values by key.

Import any module. Builds and commands use this package; training does not.
"""
