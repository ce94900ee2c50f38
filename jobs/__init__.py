"""The login node: plan a sweep, submit it, queue again what was interrupted, show what runs.
Imports no torch.
"""
