"""How the batch of a training step is generated (RL).

Read in this order: ``prompt_queue`` (the prompts of a step, and those left unfinished),
``collector`` (the rollouts of a step, or one step ahead), ``sampler`` (generates and scores this
rank's share), ``generators`` (the engine, or an agent around it), ``weight_sync`` (the engine gets
the current weights), ``batch`` (the ragged batch and its metrics), ``early_reference`` (the
reference's log-probs while others are generated), ``unfinished`` (responses exchanged between
ranks).
"""
