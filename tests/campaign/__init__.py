"""The fault campaign: a real relay under load, a seeded schedule of faults, and checks that nothing was lost.

`python -m tests.campaign --help` is the command. `schedule` plans the faults, `faults` makes them happen, `proxy`
breaks links, `deployment` owns the processes, `corpus` and `load` are the clients, `checks` judges, `report` tells.
"""
