"""`python -m holdfast.diagnostics`."""

import holdfast.runtime.rpc.quiet_grpc  # noqa: F401
from holdfast.diagnostics.service import serve
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.runtime.service import main

if __name__ == "__main__":
    main("diagnostics", DiagnosticsSettings, serve)
