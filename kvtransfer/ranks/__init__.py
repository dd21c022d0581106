"""Handoffs of nodes whose ranks have pools of their own: the driver decides, each rank moves what lies in its pool."""
