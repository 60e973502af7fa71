"""`python -m holdfast.replicator`: one checkpoint-replicator, configured by the environment (see `settings.py`)."""

import holdfast.runtime.rpc.quiet_grpc  # noqa: F401
from holdfast.replicator.service import serve
from holdfast.replicator.settings import ReplicatorSettings
from holdfast.runtime.service import main

if __name__ == "__main__":
    main("replicator", ReplicatorSettings, serve)
