"""Pictures and the HTML report, drawn from result files alone."""
