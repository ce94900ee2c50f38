"""The phases of a training step, each one function: what ``loop.py`` strings together."""
