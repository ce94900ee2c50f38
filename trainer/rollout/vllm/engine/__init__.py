"""One vLLM engine, whoever holds it: the trainer's process or a server.

Reading order: ``requests`` (what is generated); ``options``, ``option_checks`` and ``resources``
(settings, memory); ``core`` (the engine, stepped from outside); ``worker_extension`` (what vLLM's
worker gains) and what that installs: ``sampler``, ``multi_token``, ``cpu_weights``,
``cpu_kernels``. ``shared_weights`` is the memory through which servers get weights; ``isolation``
and ``model_folder`` prepare the process and the folder from which vLLM starts.
"""
