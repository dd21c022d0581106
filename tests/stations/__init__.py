"""Where a token was held up on its way from a node to its client, for campaigns and soaks.

`ring` keeps stamps, `node_stamps` and `router_stamps` make programs stamp each token as it passes, `stamps` reads them,
`account` says which station a gap belongs to, and for how much of it that station's threads waited for a processor.
"""
