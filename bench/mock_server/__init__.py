"""A server that answers when it was told to and says when it did: what a client is checked against."""
