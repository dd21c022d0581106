"""What both kinds of node need to serve an engine: router link, heartbeat, health port, engine loop. Knows no roles."""
