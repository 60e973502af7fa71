"""The leader: campaigns for the lease, folds incoming events into the state, commits the result and carries it out."""
