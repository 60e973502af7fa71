"""The history of events and steps, and the goodput that is computed from it."""
