"""Texts, names and tars of others: whatever they hold becomes a value or a reason."""
