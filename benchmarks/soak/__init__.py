"""A soak test: real training on a real stack with random faults for a given time. Its expected results are known in advance.

    python -m benchmarks.soak --minutes 30 --seed 7        or `make soak MINUTES=30 SEED=7`; writes out/soak/report.json

The modules:

    schedule.py   the times of faults, from the seed; the permitted effects of a fault on the run (pure)
    field.py      what faults are injected into; the declaration of a kind
    kinds.py      the table of faults: process_kinds.py, environment_kinds.py, how each is injected and undone
    truth.py      the correct value of the job's state at every step; the reports of the ranks (pure)
    train.py      the job, which checks its state at every step and after every restore
    rig.py        the processes: two supervisors, two diagnostics, Redis, nodes
    network.py    a network namespace per node and, between them, a switch that loses, delays and cuts (switch.py)
    relay.py      TCP relays in front of Redis that stall and reset
    clock.py      clocks that jump, of one process or one node (clock.c)
    corrupt.py    one flipped bit in a stored copy
    watch.py      reads the state of the processes and the API
    judge.py      finds errors: no progress, wrong values, restarts, evictions, leaks (pure)
    report.py     report.json, the exit code, the table for docs/architecture.md (pure)
"""
