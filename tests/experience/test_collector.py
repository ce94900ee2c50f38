"""A step's rollouts: what is drawn, by which weights, what is left over, and what a checkpoint
keeps of it.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.toy import Toy
from tests.experience.collector_parts import DATA, SCORERS, length_reward, make_rolling
from trainer.base.errors import UserError
from trainer.checkpoint.snapshot.state import decode, encode
from trainer.experience.collector import Rolling
from trainer.experience.prompts import Ask
from trainer.experience.sampler import Rollouts
from trainer.experience.weight_sync import AgreedError
from trainer.rollout import EngineFailed, Finished, NotFiniteError
from trainer.rollout.agreement import EngineDisagrees, check_agreement
from trainer.run.validation import validate
from trainer.tracking import Timers

STEPS = 4


@pytest.fixture(autouse=True)
def _no_worker_outlives_a_test() -> Iterator[None]:
    yield
    while SCORERS:
        SCORERS.pop().close()


def text(rollouts: Rollouts) -> list[Any]:
    rows = zip(rollouts.prompts, rollouts.samples, rollouts.scores, strict=True)
    return [
        (place, s.response_ids.tolist(), s.log_probs.tolist(), s.version, score.value)
        for place, s, score in rows
    ]


def run(rolling: Rolling, engine: Any, first: int = 1, last: int = STEPS) -> list[Any]:
    found = []
    for step in range(first, last + 1):
        asks, rollouts = rolling.collect(step, step - 1, Timers(), last=step == STEPS)
        found.append([(asks[place].example.index, *rest) for place, *rest in text(rollouts)])
        engine.train()
    return found


def test_scores_belong_to_their_samples_and_streaming_changes_nothing() -> None:
    streamed, engine, _ = make_rolling()
    found = run(streamed, engine)
    assert found == run(*make_rolling(streaming=False)[:2])
    assert [[i for i, *_ in step] for step in found] == [
        [i for i in range(4 * k, 4 * k + 4) for _ in range(2)] for k in range(STEPS)
    ]
    for step, rows in enumerate(found):
        for _, ids, log_probs, version, score in rows:
            assert len(ids) == len(log_probs) == score and version == step


def test_weights_that_are_handed_over_are_those_at_hand() -> None:
    rolling, engine, rollout = make_rolling(copied=True)
    assert run(rolling, engine) == run(*make_rolling()[:2])
    assert rollout.calls == [
        "start",
        *(c for v in range(STEPS) for c in ("wake", f"weights {v}", "sleep")),
    ]  # type: ignore[attr-defined]
    assert engine.whole == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_over_sampling_loses_no_prompt_and_keeps_what_it_may(staleness: int) -> None:
    rolling, engine, _ = make_rolling(over=2.0, staleness=staleness)
    found = run(rolling, engine)
    trained = [i for step in found for i, *_ in step[::2]]
    left = [a.example.index for a in rolling.prompts._waiting]
    assert (
        sorted(trained + left) == list(range(len(trained) + len(left)))
        and len(trained) == 4 * STEPS
    )
    lags = [step - version for step, rows in enumerate(found) for _, _, _, version, _ in rows]
    assert (max(lags) > 0) == (staleness > 0) and max(lags) <= staleness


def test_one_step_off_draws_with_the_weights_before() -> None:
    rolling, engine, _ = make_rolling(copied=True, staleness=1, one_step_off=True)
    found = run(rolling, engine)
    assert [{version for _, _, _, version, _ in rows} for rows in found] == [{0}, {0}, {1}, {2}]
    assert [rows[0][0] for rows in found] == [0, 4, 8, 12]
    rolling.close()


@pytest.mark.parametrize(
    "how", [{"over": 1.5, "staleness": 2}, {"copied": True, "staleness": 1, "one_step_off": True}]
)
def test_a_run_that_goes_on_from_a_checkpoint_draws_the_same(how: dict[str, Any]) -> None:
    whole, engine, _ = make_rolling(**how)
    first = run(whole, engine, last=2)
    whole.settle()
    saved = encode(whole.prompts.state_dict())
    rest = run(whole, engine, first=3)
    again, other, _ = make_rolling(**how)
    again.prompts.load_state_dict(decode(saved), DATA)
    loaded = 4 * 2 if not how.get("one_step_off") else 4 * 3
    drawn = {i for rows in first for i, *_ in rows} | {
        a.example.index for a in again.prompts._waiting
    }
    while loaded < len(drawn) or loaded <= max(drawn):
        loaded += 4
    for _ in range(loaded // 4):  # the loader's own position
        next(again.prompts._batches)
    other.train()
    other.train()
    assert run(again, other, first=3) == rest
    whole.close()
    again.close()


def test_an_error_in_generation_ends_the_judging() -> None:
    rolling, _, rollout = make_rolling()
    rollout.module.lm_head.weight.data.fill_(float("nan"))  # type: ignore[union-attr,operator]
    with pytest.raises(NotFiniteError):
        rolling.collect(1, 0, Timers(), last=False)
    assert rolling.sampler.scorer.idle() == []


def test_an_engine_with_other_weights_is_found_at_the_start() -> None:
    rolling, engine, rollout = make_rolling(copied=True)
    found: list[float] = []

    def check() -> None:
        found.append(check_agreement(rollout, engine.module, vocabulary=97, dtype=torch.float32))

    rolling._synced._check = check
    run(rolling, engine, last=2)
    assert len(found) == 1 and found[0] < 1e-4  # after the first weights, once
    with pytest.raises(EngineDisagrees, match="differ from the trainer's"):
        check()


def test_a_lost_engine_is_an_error_on_all_ranks_and_loses_no_prompt() -> None:
    rolling, engine, rollout = make_rolling()
    whole = run(*make_rolling()[:2])
    first = run(rolling, engine, last=1)
    generate = rollout.generate

    def lost(*given: Any, **how: Any) -> Any:
        raise EngineFailed("3 restarts in a row")

    rollout.generate = lost  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="3 restarts in a row"):
        rolling.collect(2, 1, Timers(), last=False)
    rollout.generate = generate  # type: ignore[method-assign]
    rolling._world.any = lambda flag: 1  # type: ignore[misc,assignment]
    with pytest.raises(EngineFailed, match="another rank"):
        rolling.collect(2, 1, Timers(), last=False)
    rolling._world.any = int  # type: ignore[misc,assignment]
    assert first + run(rolling, engine, first=2) == whole


@pytest.mark.parametrize("streaming", [True, False])
def test_a_reward_that_fails_is_an_error_on_all_ranks_and_loses_no_prompt(streaming: bool) -> None:
    failing = multiprocessing.RawValue("b", 0)

    def picky(**given: Any) -> float:
        if failing.value:
            raise ValueError("so bad")
        return length_reward(**given)

    whole = run(*make_rolling(streaming=streaming)[:2])
    rolling, engine, _ = make_rolling(streaming=streaming, reward=picky)
    first = run(rolling, engine, last=1)
    failing.value = 1
    with pytest.raises(AgreedError, match="raised ValueError: so bad"):
        rolling.collect(2, 1, Timers(), last=False)
    failing.value = 0
    prompts = rolling.prompts
    waiting, batches = prompts._waiting, prompts._batches
    prompts._waiting, prompts._batches = [], ([Toy(1, bad=0)[0]] for _ in range(1))
    with pytest.raises(AgreedError, match="toy, row 0: bad"):
        rolling.collect(2, 1, Timers(), last=False)
    prompts._waiting, prompts._batches = waiting, batches
    world: Any = rolling._world
    world.any, world.texts = lambda flag: 2, lambda mine: [mine, "it fails there"]
    with pytest.raises(AgreedError, match=r"^it fails there$"):
        rolling.collect(2, 1, Timers(), last=False)
    world.any = int
    assert first + run(rolling, engine, first=2) == whole


def test_ranks_that_share_an_engine_hear_of_one_that_leaves() -> None:
    rolling, _, rollout = make_rolling()
    generate, left = rollout.generate, list[int]()

    def noted(*given: Any, **how: Any) -> Any:
        generation = generate(*given, **how)
        stop = generation.stop
        generation.stop = lambda: left.extend(f.number for f in stop())  # type: ignore[assignment,method-assign]
        return generation

    def fails(*_: object) -> None:
        raise UserError("so bad")

    rollout.generate = noted  # type: ignore[method-assign]
    asks = {place: Ask(example=DATA[place], step=1, number=place) for place in range(6)}
    with pytest.raises(UserError):
        rolling.sampler.roll_out(asks, Timers(), finished=fails)
    assert len(set(left)) == 5


@pytest.mark.parametrize(("what", "error"), [("engine", EngineFailed), ("data", AgreedError)])
def test_what_fails_as_the_next_step_begins_is_told_where_all_ranks_meet(
    what: str, error: type[Exception]
) -> None:
    how: dict[str, Any] = {"copied": True, "staleness": 1, "one_step_off": True}
    whole, engine, _ = make_rolling(**how)
    expected = run(whole, engine)
    rolling, engine, rollout = make_rolling(**how)
    first = run(rolling, engine, last=1)
    update, batches = rollout.update_weights, rolling.prompts._batches

    def lost(*_: object) -> None:
        raise EngineFailed("gone: bad")

    if what == "engine":
        rollout.update_weights = lost  # type: ignore[method-assign]
    else:
        rolling.prompts._batches = ([Toy(1, bad=0)[0]] for _ in range(1))
    found = run(
        rolling, engine, first=2, last=2
    )  # the other ranks have this step, and so has this one
    rollout.update_weights, rolling.prompts._batches = update, batches  # type: ignore[method-assign]
    with pytest.raises(error, match="bad"):
        rolling.collect(3, 2, Timers(), last=False)
    ours, theirs = (
        [[i for i, *_ in rows] for rows in r]
        for r in (first + found + run(rolling, engine, 3), expected)
    )
    assert ours == theirs
    whole.close()
    rolling.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_sharded_weights_are_gathered_to_the_end_by_a_rank_that_lost_its_engine(
    monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    rolling, engine, rollout = make_rolling(copied=True)
    engine.settings.zero_stage = 3
    gathered: list[str] = []

    def sharded(module: Any, *, sharded: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in module.named_parameters():
            gathered.append(name)
            yield name, p

    def lost(weights: Any, version: int) -> None:
        next(iter(weights))
        raise EngineFailed("3 restarts in a row")

    monkeypatch.setattr("trainer.experience.weight_sync.whole_weights", sharded)
    engine.world = SimpleNamespace(any=lambda flag: max(int(flag), elsewhere))  # type: ignore[attr-defined]
    if not elsewhere:
        monkeypatch.setattr(rollout, "update_weights", lost)
    rolling._synced._check = lambda: pytest.fail("it gathers weights, which the other ranks don't")
    with pytest.raises(EngineFailed), rolling._synced.ready(0, Timers()):
        pytest.fail("no weights")
    assert gathered == [name for name, _ in engine.module.named_parameters()]


def to_validate(rolling: Rolling, *, elsewhere: int) -> Any:
    """What a validation needs; ``elsewhere``: whether another rank has lost its engine."""
    world = SimpleNamespace(
        rank=0, size=1, sum=dict, any=lambda flag: max(int(flag), elsewhere), texts=lambda t: [t]
    )
    trainer, data = SimpleNamespace(log_val_generations=0), SimpleNamespace(val_batch_size=2)
    reward = SimpleNamespace(path="reward.py")
    return SimpleNamespace(
        config=SimpleNamespace(data=data, trainer=trainer, custom_reward_function=reward),
        rolling=rolling,
        val_sampler=rolling.sampler,
        synced=rolling._synced,
        val_examples=[DATA[i] for i in range(30, 35)],
        world=world,
        timers=Timers(),
        tokenizer=None,
    )


def test_what_ends_a_validation_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rolling, _, rollout = make_rolling(copied=True)
    with pytest.raises(EngineFailed, match="another rank"):
        validate(to_validate(rolling, elsewhere=1), 1)

    def gone(*_: object, **__: object) -> None:
        raise EngineFailed("3 restarts in a row")

    monkeypatch.setattr(rollout, "generate", gone)
    with pytest.raises(EngineFailed, match="3 restarts in a row"):
        validate(to_validate(rolling, elsewhere=0), 1)
    failing, _, _ = make_rolling(reward=lambda **given: "what?")
    with pytest.raises(AgreedError, match="not a number"):
        validate(to_validate(failing, elsewhere=0), 1)


def test_a_validation_waits_for_what_is_drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine serves both: it takes no weights while a generation is under way."""
    rolling, _, rollout = make_rolling(copied=True, staleness=1, one_step_off=True)
    gate, under_way = threading.Event(), threading.Event()
    generate, update = rollout.generate, rollout.update_weights

    def gated(*given: Any, **how: Any) -> Iterator[Finished]:
        under_way.set()
        assert gate.wait(300)
        drawn = list(generate(*given, **how))
        under_way.clear()
        yield from drawn

    def updated(weights: Any, version: int) -> None:
        assert not under_way.is_set()
        update(weights, version)

    rolling.collect(1, 0, Timers(), last=True)
    monkeypatch.setattr(rollout, "generate", gated)
    monkeypatch.setattr(rollout, "update_weights", updated)
    rolling._ahead = rolling._begin(2, 0, Timers())
    assert under_way.wait(300)
    threading.Timer(0.2, gate.set).start()
    metrics, _ = validate(to_validate(rolling, elsewhere=0), 1)
    assert metrics["val/samples"] == 5 * rolling.sampler.n and rollout.version == 1
    monkeypatch.setattr(rollout, "generate", generate)
    asks, rollouts = rolling.collect(2, 1, Timers(), last=True)
    assert [a.example.index for a in asks] == [4, 5, 6, 7] and {
        s.version for s in rollouts.samples
    } == {0}
    rolling.close()
