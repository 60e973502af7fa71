"""Leading: campaign for the lease, fold what arrives into the state, commit, act; the snapshot that the next leader starts from."""
