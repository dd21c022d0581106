"""The parts that every program of Baton has: settings, logging, events of its start, children, a clock. Imports no
torch."""
