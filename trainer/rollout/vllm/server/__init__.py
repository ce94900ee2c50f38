"""A server: one vLLM engine behind HTTP, in a process of its own.

Reading order: ``serve`` (the process), ``loop`` (the thread that uses vLLM), ``http`` (requests).
"""
