"""Baton beside llama.cpp, OpenVINO and vLLM with packed weights: the same model, text and cores, in turns.

`python -m tests.peers.files` makes the files of a model that each engine reads. `python -m tests.peers.trial` runs
`steps` (prompts and decode steps) and `perplexity`, and appends what it finds to docs/packed.jsonl. `llama_cpp`,
`openvino_engine`, `vllm_engine` and `baton_engine` are processes, each of one engine, run by the Python that has it.
Served loads are measured by `baton bench compare`. Nothing here is imported by Baton or run in CI.
"""
