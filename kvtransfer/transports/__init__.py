"""How bytes travel. One file per transport, chosen by name and imported late."""
