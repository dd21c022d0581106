"""The life of a request: admitted, given to nodes, tried again, moved, and told to its client in order."""
