"""Checks of settings: pure functions from a ``Config`` to messages, each with its fix.

``cross`` runs them all: ``batch_sizes`` (what does not divide), ``budgets`` (tokens of a
micro-batch), ``rollout`` (generation), ``no_effect`` (keys that nothing reads under these
settings). ``problems`` makes one error of many messages.
"""
