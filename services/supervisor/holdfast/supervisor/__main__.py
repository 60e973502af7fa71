"""`python -m holdfast.supervisor`."""

import holdfast.runtime.rpc.quiet_grpc  # noqa: F401
from holdfast.runtime.service import main
from holdfast.supervisor.service import serve
from holdfast.supervisor.settings import SupervisorSettings

if __name__ == "__main__":
    main("supervisor", SupervisorSettings, serve)
