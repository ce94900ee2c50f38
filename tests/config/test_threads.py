"""Settings loaded by several threads, as a program that submits several sweeps does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.config.helpers import minimal_settings
from trainer.config import load
from trainer.config.keys import tree


def test_threads_load_settings_at_the_same_time() -> None:
    for _ in range(5):
        for cached in (tree._defaults, tree._resolved_defaults, tree.known_keys):
            cached.cache_clear()
        with ThreadPoolExecutor(8) as threads:
            configs = list(threads.map(lambda _: load(minimal_settings()), range(16)))
        assert all(config == configs[0] for config in configs)
