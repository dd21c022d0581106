"""The parts that a decoder is made of. Each owns its parameters, says how they are loaded, and computes with them."""
