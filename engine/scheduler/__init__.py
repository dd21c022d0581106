"""Which tokens are computed in the next step: admission, token budget, chunked prefill, preemption. No torch."""
