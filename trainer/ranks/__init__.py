"""The ranks of a run: how they meet, exchange small values and agree on errors.

Read ``world`` (one rank's view of all ranks, and the process groups), then ``rendezvous`` (how they
find each other), then ``agreement`` (an error of one rank is raised on all).
"""
