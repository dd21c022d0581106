"""`python -m tests.campaign`: see `tests.campaign.settings` for its flags."""

from __future__ import annotations

import sys

from tests.campaign.campaign import main
from tests.campaign.settings import parse

if __name__ == "__main__":
    sys.exit(main(parse()))
