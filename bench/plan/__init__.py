"""`baton bench plan`: what a deployment would do with a load, computed instead of measured."""
