"""`python -m holdfast.agent`: one node of the fleet."""

from functools import partial

import holdfast.runtime.rpc.quiet_grpc  # noqa: F401
from holdfast.agent.host.restart import Restart
from holdfast.agent.service import serve
from holdfast.agent.settings import AgentSettings
from holdfast.runtime.service import EXIT_OK, Farewell, main

if __name__ == "__main__":
    farewell, restart = Farewell(), Restart()
    try:
        main("agent", AgentSettings, partial(serve, farewell=farewell, restart=restart), farewell=farewell)
    except SystemExit as end:
        if restart.wanted and end.code == EXIT_OK:
            restart.begin_again()
        raise
