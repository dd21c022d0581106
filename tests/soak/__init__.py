"""A soak in parts: a relay under load and faults that no program dies of, for hours that need not be consecutive.

`python -m tests.soak --help` is the command. A part is a campaign (`tests.campaign`) of which every program lives to
the end. `kept` has the parts of a folder, `watch` takes what a part has counted, `slopes` and `summary` sum up.
"""
