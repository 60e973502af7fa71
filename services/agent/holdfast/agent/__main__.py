"""`python -m holdfast.agent`: one node of the fleet."""

from functools import partial

from holdfast.agent.service import serve
from holdfast.agent.settings import AgentSettings
from holdfast.runtime.service import Farewell, main

if __name__ == "__main__":
    farewell = Farewell()
    main("agent", AgentSettings, partial(serve, farewell=farewell), farewell=farewell)
