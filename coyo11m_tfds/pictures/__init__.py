"""Turns latents into pictures: by linear factors for each pixel, or by the decoder of a VAE."""
