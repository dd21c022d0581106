"""`python -m tests.prose [PAGE ...]`: every sentence that breaks a rule, and the words of each page."""

from __future__ import annotations

import sys

from tests.prose.pages import MAX_WORDS_OF_THE_SITE, pages, words_of_site
from tests.prose.rules import faults

all_pages = pages()
found = {name: faults(text) for name, text in all_pages.items()}
words = words_of_site(all_pages)
lines = [f"{name}:{each.line}: {each.what}: {each.sentence}" for name in sys.argv[1:] or found for each in found[name]]
lines += [f"{words.get(name, 0):7,} words, {len(found[name]):4} faults  {name}" for name in found]
lines.append(f"{sum(words.values()):7,} words of the site, which may have {MAX_WORDS_OF_THE_SITE:,}")
sys.stdout.write("\n".join(lines) + "\n")
