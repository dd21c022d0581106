"""What every transport must do, between two processes: `suite` has the tests, `rig` both ends as a test sees them, and
`end_process` one end, in a process of its own."""
