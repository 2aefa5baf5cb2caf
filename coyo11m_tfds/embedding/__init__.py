"""Captions to embeddings or token ids, part by part, resumable and shared out.

Import `out_place`, `part_maker`, `part_writer` and `part_runner`. Of this package it knows
`source`, `text`, `storage` and `process`.
"""
