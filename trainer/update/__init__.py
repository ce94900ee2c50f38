"""How a batch is learnt from: one optimizer step over micro-batches of at most a token budget.

Read in this order: ``micro_batches`` (settings of a pass and the plan they give), ``forward`` (one
micro-batch through a model), ``losses`` (what is minimised), ``optimizer_step`` (K micro-batches,
one step, out-of-memory recovery), ``auto_budget`` (``ppo_max_token_len_per_gpu=auto``).
"""
