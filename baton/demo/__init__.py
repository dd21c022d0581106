"""The demo model that ships with Baton: its checkpoint, and in a checkout how it was made."""
