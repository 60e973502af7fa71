"""`python -m holdfast.agent`: one node of the fleet."""

from holdfast.agent.service import serve
from holdfast.agent.settings import AgentSettings
from holdfast.runtime.service import main

if __name__ == "__main__":
    main("agent", AgentSettings, serve)
