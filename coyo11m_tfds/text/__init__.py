"""Text encoders: captions to tokens and embeddings, with torch or with JAX.

`text_encoders` makes encoders by name, and `parts` embeds all captions of a source in parts. An
encoder is imported at its first use, so hashed words need neither torch nor weights.
"""
