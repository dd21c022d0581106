"""`baton bench serve`: one workload against one endpoint, measured as the field measures it."""
