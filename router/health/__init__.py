"""What operators see of a router: metrics, spans, and how late its event loop is."""
