"""The rollouts of a step: which weights generate them, which prompts are left, what is saved."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.toy import Toy
from tests.experience.collector_parts import DATA, SCORERS, length_reward, make_collector
from trainer.base.errors import UserError
from trainer.checkpoint.snapshot.state import decode, encode
from trainer.experience.collector import RolloutCollector
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts
from trainer.ranks import agreement
from trainer.ranks.agreement import AgreedError
from trainer.rollout import EngineFailed, FinishedGroup, NotFiniteError
from trainer.rollout.log_prob_check import LogProbMismatch, check_log_probs
from trainer.run.validation import validate
from trainer.tracking import Timers

STEPS = 4


@pytest.fixture(autouse=True)
def _no_worker_outlives_a_test() -> Iterator[None]:
    yield
    while SCORERS:
        SCORERS.pop().close()


def as_tuples(rollouts: Rollouts) -> list[Any]:
    rows = zip(rollouts.prompt_indices, rollouts.samples, rollouts.scores, strict=True)
    return [
        (index, s.response_ids.tolist(), s.log_probs.tolist(), s.version, score.value)
        for index, s, score in rows
    ]


def run(collector: RolloutCollector, engine: Any, first: int = 1, last: int = STEPS) -> list[Any]:
    """Per step and response: (index of the prompt, ids, log-probs, version, score)."""
    steps = []
    for step in range(first, last + 1):
        requests, rollouts = collector.collect(step, step - 1, Timers(), last=step == STEPS)
        responses = as_tuples(rollouts)
        steps.append([(requests[index].example.index, *rest) for index, *rest in responses])
        engine.train()
    return steps


def test_scores_belong_to_their_samples_and_streaming_changes_nothing() -> None:
    streamed, engine, _ = make_collector()
    steps = run(streamed, engine)
    assert steps == run(*make_collector(streaming=False)[:2])
    assert [[i for i, *_ in rows] for rows in steps] == [
        [i for i in range(4 * k, 4 * k + 4) for _ in range(2)] for k in range(STEPS)
    ]
    for step, rows in enumerate(steps):
        for _, ids, log_probs, version, score in rows:
            assert len(ids) == len(log_probs) == score and version == step


def test_an_engine_with_its_own_weights_generates_with_the_current_ones() -> None:
    collector, engine, rollout = make_collector(copied=True)
    assert run(collector, engine) == run(*make_collector()[:2])
    assert rollout.calls == [
        "start",
        *(c for v in range(STEPS) for c in ("wake", f"weights {v}", "sleep")),
    ]  # type: ignore[attr-defined]
    assert engine.gathers == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_over_sampling_loses_no_prompt_and_keeps_partial_responses(staleness: int) -> None:
    collector, engine, _ = make_collector(over_sampling=2.0, max_staleness=staleness)
    steps = run(collector, engine)
    trained = [i for rows in steps for i, *_ in rows[::2]]
    left = [request.example.index for request in collector.prompts._waiting]
    assert sorted(trained + left) == list(range(len(trained) + len(left)))
    assert len(trained) == 4 * STEPS
    lags = [step - version for step, rows in enumerate(steps) for _, _, _, version, _ in rows]
    assert (max(lags) > 0) == (staleness > 0)
    assert max(lags) <= staleness


def test_one_step_off_generates_with_the_weights_of_the_step_before() -> None:
    collector, engine, _ = make_collector(copied=True, max_staleness=1, one_step_off=True)
    steps = run(collector, engine)
    assert [{version for _, _, _, version, _ in rows} for rows in steps] == [{0}, {0}, {1}, {2}]
    assert [rows[0][0] for rows in steps] == [0, 4, 8, 12]
    collector.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"over_sampling": 1.5, "max_staleness": 2},
        {"copied": True, "max_staleness": 1, "one_step_off": True},
    ],
)
def test_a_run_resumed_from_a_checkpoint_generates_the_same(settings: dict[str, Any]) -> None:
    whole, engine, _ = make_collector(**settings)
    first = run(whole, engine, last=2)
    whole.drain()
    saved = encode(whole.prompts.state_dict())
    rest = run(whole, engine, first=3)
    again, other, _ = make_collector(**settings)
    again.prompts.load_state_dict(decode(saved), DATA)
    loaded = 4 * 2 if not settings.get("one_step_off") else 4 * 3
    seen = {i for rows in first for i, *_ in rows}
    seen |= {request.example.index for request in again.prompts._waiting}
    while loaded < len(seen) or loaded <= max(seen):
        loaded += 4
    for _ in range(loaded // 4):  # the position of the loader
        next(again.prompts._batches)
    other.train()
    other.train()
    assert run(again, other, first=3) == rest
    whole.close()
    again.close()


def test_an_error_in_generation_ends_the_scoring() -> None:
    collector, _, rollout = make_collector()
    rollout.module.lm_head.weight.data.fill_(float("nan"))  # type: ignore[union-attr,operator]
    with pytest.raises(NotFiniteError):
        collector.collect(1, 0, Timers(), last=False)
    assert collector.sampler.scorer.idle() == []


def test_an_engine_with_wrong_weights_is_detected_at_the_start() -> None:
    collector, engine, rollout = make_collector(copied=True)
    differences: list[float] = []

    def check() -> None:
        difference = check_log_probs(rollout, engine.module, vocabulary=97, dtype=torch.float32)
        differences.append(difference)

    collector._weight_sync._check = check
    run(collector, engine, last=2)
    assert len(differences) == 1 and differences[0] < 1e-4  # once, after the first weights
    with pytest.raises(LogProbMismatch, match="differ from the trainer's"):
        check()


def test_a_lost_engine_is_an_error_on_all_ranks_and_loses_no_prompt() -> None:
    collector, engine, rollout = make_collector()
    whole = run(*make_collector()[:2])
    first = run(collector, engine, last=1)
    generate = rollout.generate

    def lost(*args: Any, **kwargs: Any) -> Any:
        raise EngineFailed("3 restarts in a row")

    rollout.generate = lost  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="3 restarts in a row"):
        collector.collect(2, 1, Timers(), last=False)
    rollout.generate = generate  # type: ignore[method-assign]
    collector._world.any = lambda flag: 1  # type: ignore[misc,assignment]
    with pytest.raises(EngineFailed, match="another rank"):
        collector.collect(2, 1, Timers(), last=False)
    collector._world.any = int  # type: ignore[misc,assignment]
    assert first + run(collector, engine, first=2) == whole


@pytest.mark.parametrize("streaming", [True, False])
def test_a_reward_that_fails_is_an_error_on_all_ranks_and_loses_no_prompt(streaming: bool) -> None:
    failing = multiprocessing.RawValue("b", 0)

    def picky(**kwargs: Any) -> float:
        if failing.value:
            raise ValueError("so bad")
        return length_reward(**kwargs)

    whole = run(*make_collector(streaming=streaming)[:2])
    collector, engine, _ = make_collector(streaming=streaming, reward=picky)
    first = run(collector, engine, last=1)
    failing.value = 1
    with pytest.raises(AgreedError, match="raised ValueError: so bad"):
        collector.collect(2, 1, Timers(), last=False)
    failing.value = 0
    prompts = collector.prompts
    waiting = prompts._waiting
    batches = prompts._batches
    prompts._waiting = []
    prompts._batches = ([Toy(1, bad=0)[0]] for _ in range(1))
    with pytest.raises(AgreedError, match="toy, row 0: bad"):
        collector.collect(2, 1, Timers(), last=False)
    prompts._waiting = waiting
    prompts._batches = batches
    world: Any = collector._world
    world.any = lambda flag: agreement._USER_ERROR
    world.gather = lambda text: [text, "it fails there"]
    with pytest.raises(AgreedError, match=r"^it fails there$"):
        collector.collect(2, 1, Timers(), last=False)
    world.any = int
    assert first + run(collector, engine, first=2) == whole


def test_a_rank_whose_reward_fails_stops_the_generation_it_shares() -> None:
    collector, _, rollout = make_collector()
    generate = rollout.generate
    left: list[int] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        generation = generate(*args, **kwargs)
        stop = generation.stop
        generation.stop = lambda: left.extend(f.number for f in stop())  # type: ignore[assignment,method-assign]
        return generation

    def fails(*_: object) -> None:
        raise UserError("so bad")

    rollout.generate = recorded  # type: ignore[method-assign]
    requests = {i: PromptRequest(example=DATA[i], step=1, number=i) for i in range(6)}
    with pytest.raises(UserError):
        collector.sampler.roll_out(requests, Timers(), on_finished=fails)
    assert len(set(left)) == 5


@pytest.mark.parametrize(("failing", "error"), [("engine", EngineFailed), ("data", AgreedError)])
def test_a_failure_while_generating_ahead_is_raised_in_the_next_step_on_all_ranks(
    failing: str, error: type[Exception]
) -> None:
    settings: dict[str, Any] = {"copied": True, "max_staleness": 1, "one_step_off": True}
    whole, engine, _ = make_collector(**settings)
    expected = run(whole, engine)
    collector, engine, rollout = make_collector(**settings)
    first = run(collector, engine, last=1)
    update = rollout.update_weights
    batches = collector.prompts._batches

    def lost(*_: object) -> None:
        raise EngineFailed("gone: bad")

    if failing == "engine":
        rollout.update_weights = lost  # type: ignore[method-assign]
    else:
        collector.prompts._batches = ([Toy(1, bad=0)[0]] for _ in range(1))
    # All ranks have the rollouts of this step.
    second = run(collector, engine, first=2, last=2)
    rollout.update_weights = update  # type: ignore[method-assign]
    collector.prompts._batches = batches
    with pytest.raises(error, match="bad"):
        collector.collect(3, 2, Timers(), last=False)
    steps = first + second + run(collector, engine, 3)
    assert [[i for i, *_ in rows] for rows in steps] == [[i for i, *_ in rows] for rows in expected]
    whole.close()
    collector.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rank_that_lost_its_engine_gathers_sharded_weights_to_the_end(
    monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    collector, engine, rollout = make_collector(copied=True)
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
    collector._weight_sync._check = lambda: pytest.fail(
        "it gathers weights, which the other ranks don't"
    )
    with pytest.raises(EngineFailed), collector._weight_sync.ready(0, Timers()):
        pytest.fail("no weights")
    assert gathered == [name for name, _ in engine.module.named_parameters()]


def validation_context(collector: RolloutCollector, *, elsewhere: int) -> Any:
    """The context of a validation; ``elsewhere``: 1 when another rank has lost its engine."""
    world = SimpleNamespace(
        rank=0,
        size=1,
        sum=dict,
        any=lambda flag: max(int(flag), elsewhere),
        gather=lambda value: [value],
        broadcast=lambda value: value,
        is_main=False,
    )
    config = SimpleNamespace(
        data=SimpleNamespace(val_batch_size=2),
        trainer=SimpleNamespace(log_val_generations=0, validation_data_dir=None),
        custom_reward_function=SimpleNamespace(path="reward.py"),
        reward=SimpleNamespace(max_failed_share=0.1),
    )
    return SimpleNamespace(
        config=config,
        collector=collector,
        val_sampler=collector.sampler,
        weight_sync=collector._weight_sync,
        val_examples=[DATA[i] for i in range(30, 35)],
        world=world,
        timers=Timers(),
        tokenizer=None,
    )


def test_a_failure_in_validation_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, _, rollout = make_collector(copied=True)
    with pytest.raises(EngineFailed, match="another rank"):
        validate(validation_context(collector, elsewhere=1), 1)

    def gone(*_: object, **__: object) -> None:
        raise EngineFailed("3 restarts in a row")

    monkeypatch.setattr(rollout, "generate", gone)
    with pytest.raises(EngineFailed, match="3 restarts in a row"):
        validate(validation_context(collector, elsewhere=0), 1)
    failing, _, _ = make_collector(reward=lambda **kwargs: "what?")
    with pytest.raises(AgreedError, match="not a number"):
        validate(validation_context(failing, elsewhere=0), 1)


def test_a_validation_waits_for_the_generation_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine serves both: it takes no weights while a generation is under way."""
    collector, _, rollout = make_collector(copied=True, max_staleness=1, one_step_off=True)
    gate = threading.Event()
    under_way = threading.Event()
    generate = rollout.generate
    update = rollout.update_weights

    def gated(*args: Any, **kwargs: Any) -> Iterator[FinishedGroup]:
        under_way.set()
        assert gate.wait(300)
        finished = list(generate(*args, **kwargs))
        under_way.clear()
        yield from finished

    def updated(weights: Any, version: int) -> None:
        assert not under_way.is_set()
        update(weights, version)

    collector.collect(1, 0, Timers(), last=True)
    monkeypatch.setattr(rollout, "generate", gated)
    monkeypatch.setattr(rollout, "update_weights", updated)
    collector._ahead = collector._generate_ahead(2, 0, Timers())
    assert under_way.wait(300)
    threading.Timer(0.2, gate.set).start()
    metrics = validate(validation_context(collector, elsewhere=0), 1).metrics
    assert metrics["val/samples"] == 5 * collector.sampler.n and rollout.version == 1
    monkeypatch.setattr(rollout, "generate", generate)
    requests, rollouts = collector.collect(2, 1, Timers(), last=True)
    assert [request.example.index for request in requests] == [4, 5, 6, 7]
    assert {sample.version for sample in rollouts.samples} == {0}
    collector.close()
