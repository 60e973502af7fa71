"""The bridge to Kubernetes: sends changes of the cluster's machines to the supervisor.

    API server ──list, watch──► watch.py ──► machines.py (cluster)  ┐
                                                                    ├──► changes.py ──► notices, zones, nodes to forget
    supervisor's state ──the nodes of the fleet, their notices──────┘

Theory of operation. The cluster's objects are folded into one value (`Cluster`). The changes to send are the difference between
that value and the supervisor's state. So no history is needed: a new leader lists the objects and computes the same difference,
a lost change is computed again, and a duplicate change has no effect.

If a machine is cordoned, will be terminated or has maintenance, a notice is sent; when this ends, the notice is withdrawn. For
a NotReady machine no notice is sent, because NotReady proves nothing, and a lost node is detected by its agent's connections.
While the API server does not answer, or refuses, nothing changes: notices remain, and end an hour after they were last
confirmed.

    machines.py   objects → values (pure)            api.py     requests to the API server
    changes.py    changes to send (pure)             watch.py   one kind of object, listed and watched
    bridge.py     the shell that the leader runs     replace.py moves the pod of an unschedulable machine
"""
