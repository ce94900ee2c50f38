"""The engine ``vllm``: vLLM in the trainer's process.

Reading order: ``engine`` (the engine), ``generation`` (a generation, step by step), ``shards`` and
``request_exchange`` (for ranks that share one engine: their group, and their requests).
"""
