"""From images to latents: settings, parts and their tars, decoding, receipts, and counts."""
