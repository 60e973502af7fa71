"""Nodes that fail.

suspects.py      suspected nodes test themselves while they prepare
link_tests.py    network tests between nodes without ranks
quarantine.py    repeat offenders get no ranks
reboots.py       machines that must be booted; replacements.py  machines that do not return
capacity.py      how many nodes are missing
"""
