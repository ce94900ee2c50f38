"""Ranks: process groups, the DeepSpeed engine, exchange of ragged columns."""
