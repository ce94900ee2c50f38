"""The life of a run on one rank: built, trained step by step, saved, finished.

Read ``step`` first: the training step from rollout to update on one screen. It calls
``log_probs``, ``attach_advantages`` and ``policy_update``. ``loop`` puts validation, logging,
checkpoints and stops around it; ``build`` makes every component from the settings, ``context``
lists them, ``reference`` makes the reference model of the KL. ``checkpoints`` decides when to save
(with ``save_time``, ``best_metric`` and ``attempt``) and, by ``rollback``, when to go back;
``state`` lists what is saved. ``reporter``
and ``batching_metrics`` report, ``validation`` measures, ``rules_check`` and
``data_check`` run before the first step
and ``finish`` after the last.
"""
