"""Control messages and what they are made of: everything that two programs of Baton must agree on. Imports no torch."""
