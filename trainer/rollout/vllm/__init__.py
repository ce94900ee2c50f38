"""Generation by vLLM: in the trainer's process, or in server processes.

Reading order: ``make`` (from the config to an engine), ``engine`` (one vLLM engine: options,
weights, sampling), ``in_process`` (the engine ``vllm``), ``server`` (an engine behind HTTP),
``client`` (the engine ``vllm_server``, with servers on the trainer's nodes), ``nodes`` (servers on
nodes that train nothing). Each package imports only those named before it, except ``make``, which
imports them all. Nothing imports vLLM before an engine starts.

New weights reach servers through ``client/weight_store`` and ``engine/shared_weights`` (memory of a
node), other nodes through ``nodes/weight_upload``; ``engine/core`` loads them, on a CPU by
``engine/cpu_weights``.
"""
