"""Text encoders: captions to tokens and embeddings, with torch or with JAX."""
