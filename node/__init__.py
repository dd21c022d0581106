"""What a process needs to serve an engine: link to the router, heartbeat, health port, the loop. Knows no roles."""
