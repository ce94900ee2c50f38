"""The number of this attempt, and a digest of the settings that all attempts share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from trainer.base.run_folder import new_attempt
from trainer.config.keys import dotted
from trainer.config.keys.fields import may_change_keys
from trainer.config.schema import Config
from trainer.config.user_files import paths_of


def attempt_number(run_dir: Path, is_main: bool) -> int:
    """This attempt's number, from whoever started the ranks; a rank started by hand picks one."""
    if "PLIMSOLL_ATTEMPT" not in os.environ:
        number = new_attempt(run_dir) if is_main else 1
        os.environ["PLIMSOLL_ATTEMPT"] = str(number)
    return int(os.environ["PLIMSOLL_ATTEMPT"])


def config_hash(config: Config) -> str:
    """A digest of the settings that decide what is learnt: those that may not change on resume."""
    values = config.model_dump(mode="json")
    for name in may_change_keys():
        *path, key = name.split(".")
        section: Any = values
        for part in path:
            section = section[part]
        section.pop(key, None)
    for name in paths_of(config):
        # The folder of a copy names its digest; where the run folder lies does not matter.
        dotted.put(values, name, "/".join(Path(str(dotted.get(values, name))).parts[-2:]))
    return xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
