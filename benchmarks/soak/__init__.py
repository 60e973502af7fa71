"""A soak: real training on a real stack, broken at random for as long as asked, judged by what can be known beforehand.

    python -m benchmarks.soak --minutes 30 --seed 7        or `make soak MINUTES=30 SEED=7`; writes out/soak/report.json

Where to look, from what is asked to what is answered:

    schedule.py   which faults strike when, from the seed; what a fault may do to the run (pure)
    kinds.py      the table of faults: how each is made and undone
    truth.py      what every value of the job must be at every step; how the ranks report (pure)
    train.py      the job: checks itself at every step and after every restore
    rig.py        the processes: two supervisors, two diagnostics, Redis, nodes
    network.py    a network namespace per node and, between them, a switch that loses, delays and cuts (switch.py)
    relay.py      TCP relays in front of Redis that stall and reset
    clock.py      clocks that jump, one process or one node at a time (clock.c)
    corrupt.py    one flipped bit in a stored copy
    watch.py      what the processes do, and what the API says
    judge.py      what is wrong: dead, wrong, stopped, evicted, leaked (pure)
    report.py     report.json, the exit code, the table for docs/architecture.md (pure)
"""
