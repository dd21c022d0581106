"""`baton bench sweep`: the highest rate at which a target still meets its service level objective."""
