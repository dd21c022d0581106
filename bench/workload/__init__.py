"""What is asked and when: datasets, traces, arrival processes. Sends nothing."""
