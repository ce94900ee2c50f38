"""What ``python -m trainer -m`` is to the launcher, without the trainer."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

CONF = str(Path(__file__).parents[2] / "conf")


@hydra.main(config_path=CONF, config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    raise AssertionError("the launcher never calls the task function")


if __name__ == "__main__":
    main()
