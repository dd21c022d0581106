"""Endpoints for operators and load balancers."""
