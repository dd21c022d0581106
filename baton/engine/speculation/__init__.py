"""Where drafts come from: text that repeats itself. The scheduler knows their protocol, and nothing of this package."""
