"""What learns: the model, its step, its state and their placement on devices."""
