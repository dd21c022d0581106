"""The parts that both kinds of node share: router link, heartbeat, health port, engine loop. Knows no roles."""
