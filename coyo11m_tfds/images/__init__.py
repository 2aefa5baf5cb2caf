"""Images before they are encoded: in a folder, in tars or in Parquet files, with their texts."""
