"""Reports: how often jobs were interrupted, for how long, where their time went, and what that cost."""
