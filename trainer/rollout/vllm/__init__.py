"""Generation by vLLM: in the trainer's process, or in servers of its own.

Nothing here imports vLLM before an engine starts.
"""
