"""The bridge to Kubernetes: what the cluster's API server knows of machines, and what Holdfast should know of it.

    API server ──list, watch──► watch.py ──► machines.py (cluster)  ┐
                                                                    ├──► changes.py ──► notices, zones, nodes to forget
    supervisor's state ──the nodes of the fleet, their notices──────┘

Theory of operation. The cluster's objects are folded into one value (`Cluster`), and what the supervisor should be told is
the difference between that value and what its state says already. So nothing has to be remembered: a new leader lists the
objects and finds the same difference, a change that was lost is found again, and one that was told twice says nothing new.

A machine that is cordoned, is to be terminated or has maintenance is announced; when that is over the notice is withdrawn.
A machine that is NotReady is not: that proves nothing, and whether a node is lost is for its agent's connections to tell.
While the API server does not answer, or refuses, nothing is concluded: notices stay as they are, and end an hour after they
were last confirmed.

    machines.py   objects → values (pure)            api.py     requests to the API server
    changes.py    what the supervisor is told (pure) watch.py   one kind of object, listed and watched
    bridge.py     the shell that the leader runs     replace.py another machine for a pod of a condemned one
"""
