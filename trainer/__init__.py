"""What runs on the compute node: the trainer."""

__version__ = "0.1.0"
