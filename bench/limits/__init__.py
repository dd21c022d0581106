"""`baton bench limits`: what the machine could do, and how much of it Baton uses."""
