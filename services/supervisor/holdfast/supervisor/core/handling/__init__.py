"""What is done for jobs. This room uses all others.

findings.py         findings → incidents         decisions.py  incidents → decisions
jobs.py             a job from its submission to its end
job_needs.py        reconciliation: uses nodes that became free; shortage.py  which nodes a job waits for, in words
reconcile.py        compares the workers that run with those that should
change_failures.py  what goes wrong during a change
resetting.py        jobs that wait for a reset of GPUs
notices.py          maintenance notices
"""
