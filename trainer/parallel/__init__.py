"""Training over several ranks: DeepSpeed's engine, sharded weights, exchange of ragged batches.

Read ``engine`` first (``backward`` for each micro-batch, then ``step``), then ``deepspeed_setup``
(how DeepSpeed is configured) and ``adamw`` (the optimizer where DeepSpeed does too little).
``weights`` yields whole weights one by one, ``exchange`` gathers batches, ``host_memory`` gives
memory back, ``selftest`` checks gradients at the start.
"""
