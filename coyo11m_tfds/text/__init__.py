"""Text encoders: captions to tokens and embeddings, with torch or with JAX.

Import `text_encoders`, which makes an encoder of its name, and `part_runner`, which embeds all
captions of a source in parts. Encoders are loaded when they are asked for, so that hashed words
need neither torch nor weights.
"""
