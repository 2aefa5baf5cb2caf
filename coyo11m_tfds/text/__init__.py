"""Text encoders: captions to tokens and embeddings, with torch or with JAX.

Import `text_encoders`, which makes encoders by name, and `parts`, which embeds all captions of a
source in parts. An encoder is imported only when it is needed, so hashed words need neither torch
nor weights.
"""
