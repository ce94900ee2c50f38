"""The snapshot of one rank: what a checkpoint holds, laid out as files in host memory.

Read in this order:
``state_registry`` a run's own state, by name, and ``state`` its encoding without code;
``capture`` DeepSpeed's state dicts, without writing them; ``fragments`` where the tensors of an
engine lie, in the model's own terms; ``torch_file`` and ``zip_layout`` the layout of a
``torch.save`` file; ``index`` which bytes of which file hold which fragment; ``plan`` the files of
a rank in a host buffer; ``planner`` from an engine to a plan; ``host_buffer`` the shared memory.
"""
