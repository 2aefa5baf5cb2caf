"""Latents as pictures: linear factors for each pixel, or the decoder of a VAE."""
