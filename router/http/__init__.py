"""Everything that speaks HTTP: the server, the APIs, keys, admission, the page, and endpoints for operators."""
