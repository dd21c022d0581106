"""`python -m tests.soak --minutes M`: a relay under load and faults that no program dies of, one every ten seconds.

It is a campaign (`tests.campaign`) of which every program lives to the end, so that what it holds can be compared over
its whole life: files, threads and memory have to be flat (`tests.campaign.growth`). Whatever a campaign checks, this
checks too. More flags are those of a campaign.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from tests.campaign.campaign import main
from tests.campaign.settings import parse

KINDS = "freeze,slow,cut,delay,throttle,loss,hole,hole-one-way,descriptors,disk-full,router-freeze,router-slow"
_PER_MINUTE = 6

if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    options, more = parser.parse_known_args()
    num_faults = round(options.minutes * _PER_MINUTE)
    flags = ["--faults", f"{num_faults}", "--minutes", f"{options.minutes:g}", "--kinds", KINDS]
    sys.exit(main(parse([*flags, *more])))
