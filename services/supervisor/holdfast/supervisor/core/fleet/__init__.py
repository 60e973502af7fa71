"""The nodes, and what one needs before it gets ranks.

nodes.py    states of nodes                  breaker.py  the circuit breaker of the fleet
spares.py   free nodes, and the jobs that may take them  warmth.py  their worker templates
resets.py   GPUs that get no ranks before they are reset
returns.py  nodes that return after a fault took them out of service
invites.py  invitations, with which machines become nodes
"""
