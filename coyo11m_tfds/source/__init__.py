"""The source: `.pt` files and Parquet. Finds, checks and mirrors them; looks captions up by key.

Import `location`, `source_latents`, `pt_file`, `pt_check`, `caption_store`, `embedding_store` and
`copied_files`. Builds and commands use this room; training does not.
"""
