"""Nodes as the router knows them: their control connections, what each has been given, and which are alive."""
