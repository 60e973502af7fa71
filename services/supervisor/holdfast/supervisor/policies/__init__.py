"""Evaluates policies: selects the questions to ask now, and runs a user's script in its own process."""
