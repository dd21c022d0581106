"""The demo model that ships with Baton: its text generator, its training script and its checkpoint."""
