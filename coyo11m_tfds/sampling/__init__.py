"""Which records a batch has: their order, the shares of mixtures, and conditions of users."""
