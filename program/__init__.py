"""What every program of Baton has: settings from flags, environment and file; logging; a clock. Imports no torch."""
