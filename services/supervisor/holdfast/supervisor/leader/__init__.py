"""Leading: campaign for the lease, fold what arrives into the state, commit it, act on it."""
