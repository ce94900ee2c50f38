"""One rank's generation engine, and samplers over it."""

from __future__ import annotations

from pathlib import Path

from trainer.config.schema import Config
from trainer.data.encode import read_template
from trainer.experience.sampler import Sampler, Speaker
from trainer.experience.weight_sync import Synced
from trainer.models import LoadedModel
from trainer.parallel.engine import Engine
from trainer.ranks.world import World
from trainer.rewards import Scorer
from trainer.rollout import Sampling, eos_ids, make_engine
from trainer.rollout.agent import AgentRunner
from trainer.rollout.agreement import check_agreement
from trainer.rollout.load_agent import load_agent
from trainer.rollout.template import ObservationTokens
from trainer.rollout.turns import Turns

VALIDATION_STREAM = 0x5EED
"""Separates validation's random numbers from training's."""


class Generation:
    """Training and validation draw with one engine, each in its own way."""

    def __init__(
        self,
        config: Config,
        loaded: LoadedModel,
        engine: Engine,
        scorer: Scorer,
        world: World,
        run_dir: Path,
    ) -> None:
        self._config, self._loaded, self._scorer = config, loaded, scorer
        rollout = config.actor_rollout_ref.rollout
        made = make_engine(rollout, loaded, engine.module, world, run_dir)
        dtype = next(engine.module.parameters()).dtype

        def check() -> None:
            with engine.whole_weights() as module:
                check_agreement(
                    made,
                    module,
                    vocabulary=loaded.shape.vocab,
                    dtype=dtype,
                    temperature=rollout.temperature,
                )

        self.synced = Synced(made, engine, check=check)
        self._speaker = self._speak(engine)

    def sampler(self, *, validation: bool = False) -> Sampler:
        """How training draws, or ``validation``."""
        rollout, config = self._config.actor_rollout_ref.rollout, self._config
        how = rollout.val_kwargs if validation else rollout
        return Sampler(
            speaker=self._speaker,
            sampling=Sampling(
                max_response_length=rollout.response_length,
                temperature=how.temperature,
                top_p=how.top_p,
                top_k=how.top_k,
                do_sample=how.do_sample,
            ),
            n=how.n,
            scorer=self._scorer,
            tokenizer=self._loaded.tokenizer,
            seed=config.trainer.seed + (VALIDATION_STREAM if validation else 0),
            streaming=rollout.streaming,
            timer="val_" if validation else "",
        )

    def _speak(self, engine: Engine) -> Speaker:
        agent, data = self._config.actor_rollout_ref.rollout.agent, self._config.data
        if agent.name is None:
            return self.synced.rollout
        tokenizer = self._loaded.tokenizer
        return Turns(
            self.synced.rollout,
            AgentRunner(
                load_agent(agent.name, agent.path), name=agent.name, timeout_s=agent.turn_timeout_s
            ),
            tokenizer=tokenizer,
            observations=ObservationTokens(
                tokenizer,
                longest=agent.max_observation_length,
                template=read_template(data.chat_template),
                kwargs=data.apply_chat_template_kwargs,
            ),
            eos_ids=eos_ids(engine.module, tokenizer),
            max_turns=agent.max_turns,
        )
