"""What the programs of Baton say to each other: messages, codec, errors, parameters, settings. Imports no torch."""
