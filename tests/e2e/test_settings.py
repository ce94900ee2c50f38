"""Short runs with settings that change the structure of a training step."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

from tests.e2e.runs import GRPO, finish, rows
from trainer.base.run_folder import read_json_lines
from trainer.models.cache import cache_root

TWO_STEPS = "trainer.total_training_steps=2"
ACTOR = "actor_rollout_ref.actor"


def test_many_optimizer_steps_with_kl_entropy_buckets_and_zero_3(tmp_path: Path) -> None:
    """With two mini-batches and two epochs per rollout, old log-probs are recomputed and the ratio
    moves away from 1.
    """
    finish(
        tmp_path,
        *(override for override in GRPO if "ppo_mini_batch_size" not in override),
        TWO_STEPS,
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.entropy_coeff=0.01",
        f"{ACTOR}.dynamic_bsz_bucketing=true",
        f"{ACTOR}.bucket_boundaries=[16,64]",
        f"{ACTOR}.zero_stage=3",
        f"{ACTOR}.optim.lr=1e-3",
        # Measured, although the actor's budget is not.
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=auto",
    )
    records = rows(tmp_path)
    assert [row["training/global_step"] for row in records] == [1, 2]
    for row in records:
        assert row["actor/optimizer_steps"] == 4
        assert math.isfinite(row["actor/grad_norm"]) and row["actor/entropy"] > 0
        assert row["actor/kl_loss"] >= 0
        assert any("old_log_prob" in key for key in row)


def test_static_micro_batches_for_a_user_whose_home_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # root may write anywhere but below a file
    run = tmp_path / "run"
    home = tmp_path / "file/home"
    screen = finish(
        run,
        *(override for override in GRPO if "logger" not in override),
        TWO_STEPS,
        "trainer.logger=[console,wandb]",
        "trainer.test_freq=1",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        HOME=str(home),
        XDG_CACHE_HOME="",
        PLIMSOLL_CACHE=str(cache_root(None)),
    )
    (warning,) = [line for line in screen.splitlines() if str(tmp_path / "file") in line]
    assert f"caches of libraries are kept in {run}/caches instead" in warning
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert list(folder.glob("files/media/table/val/*.table.json"))  # staged in a cache
    assert (run / "plots/reward.png").is_file()
    records = rows(run)
    assert [row["training/global_step"] for row in records] == [1, 2]
    assert all(row["batch/num_micro_batches"] == 4 for row in records)


def test_two_ranks_write_profiles_and_all_responses(tmp_path: Path) -> None:
    val = "actor_rollout_ref.rollout.val_kwargs"
    texts = tmp_path / "texts"
    screen = finish(
        tmp_path,
        *GRPO,
        TWO_STEPS,
        "trainer.n_gpus_per_node=2",
        "trainer.profiler.steps=[2]",
        "trainer.profiler.ranks=[1]",
        "trainer.profiler.contents=[cpu,memory]",
        "trainer.test_freq=1",
        "trainer.val_before_train=true",
        f"{val}.n=4",
        f"{val}.do_sample=true",
        f"{val}.temperature=1.0",
        f"trainer.rollout_data_dir={texts}/train",
        f"trainer.validation_data_dir={texts}/val",
    )
    check_responses(texts, rows(tmp_path))
    folder = tmp_path / "profile/step_2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "phases.json",
        "rank_1.pt.trace.json.gz",
        "rank_1.txt",
    ]
    assert f"phases of all ranks: {folder}/phases.json" in screen
    events = json.loads((folder / "phases.json").read_text())["traceEvents"]
    for rank in (0, 1):
        names = [
            event["args"]["name"] for event in events if event["pid"] == rank and "args" in event
        ]
        assert names[0].startswith(f"rank {rank} (") and names[1:] == ["phases", "exchanges"]
        spans = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        phases = {span["name"]: span for span in spans if span["tid"] == 0}
        exchanges = {span["name"] for span in spans if span["tid"] == 1}
        assert {"gen", "reward", "adv", "update_actor"} <= set(phases)
        assert {"all_gather", "all_reduce"} <= exchanges
        assert phases["gen"]["ts"] < phases["update_actor"]["ts"]
        seconds = rows(tmp_path)[-1]["timing/update_actor"]
        if rank == 0:
            assert abs(phases["update_actor"]["dur"] / 1e6 - seconds) < 0.01
    with gzip.open(folder / "rank_1.pt.trace.json.gz") as file:
        trace = json.load(file)["traceEvents"]
    assert any(event["name"] == "aten::mm" for event in trace)
    assert "aten::mm" in (folder / "rank_1.txt").read_text()
    log = (tmp_path / "logs/attempt_1/rank_1.log").read_text()
    assert "profile of this step" in log and " x  aten::mm" in log
    assert folder.stat().st_mode & 0o77 == 0


def check_responses(texts: Path, records: list[dict[str, Any]]) -> None:
    """The files hold every response once, and the metrics are those of the files."""
    assert sorted(path.name for path in (texts / "val").iterdir()) == [
        "0.jsonl",
        "1.jsonl",
        "2.jsonl",
    ]
    by_step = {record["step"]: record for record in records}
    first, last = (read_json_lines(texts / f"val/{step}.jsonl") for step in (0, 2))
    assert [row["input"] for row in first] == [row["input"] for row in last]
    source = last[0]["data_source"]
    mean = sum(row["score"] for row in last) / len(last)
    assert math.isclose(by_step[2][f"val-core/{source}/reward/mean@4"], mean, abs_tol=1e-9)
    assert math.isclose(by_step[2]["val/reward"], mean, abs_tol=1e-9)
    assert len(last) == by_step[2]["val/samples"] and "val/win_rate" not in by_step[0]
    assert 0 <= by_step[2]["val/win_rate"] <= 1
    for step in (1, 2):
        trained = read_json_lines(texts / f"train/{step}.jsonl")
        scores = [row["score"] for row in trained]
        assert math.isclose(by_step[step]["critic/score/mean"], sum(scores) / len(scores))
        assert {row["step"] for row in trained} == {step}
        assert all(row["output"] is not None and row["gts"] for row in trained)
        lengths = [row["response_length"] for row in trained]
        mean_length = by_step[step]["response_length/mean"]
        assert math.isclose(mean_length, sum(lengths) / len(lengths), rel_tol=1e-6)
    assert (texts / "train/1.jsonl").stat().st_mode & 0o77 == 0


def test_dapo_on_two_ranks_with_truncated_responses_masked(tmp_path: Path) -> None:
    changed = ("ppo_mini_batch_size", "max_response_length")
    finish(
        tmp_path,
        *(override for override in GRPO if not any(key in override for key in changed)),
        TWO_STEPS,
        "trainer.n_gpus_per_node=2",
        "algorithm=dapo",
        "algorithm.filter_groups.metric=length",
        "algorithm.mask_truncated_completions=true",
        f"custom_reward_function.path={Path(__file__).parent / 'length_reward.py'}",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=k3+",
        "data.max_response_length=200",  # about half of the responses end before
    )
    for row in rows(tmp_path):
        assert row["rollout/kept_prompts"] == 4 and row["actor/optimizer_steps"] == 2
        assert row["rollout/num_gen_batches"] >= 1
        assert 0 < row["rollout/kept_share"] <= 1
        assert 0 < row["response_length/clip_ratio"] < 1 and row["actor/kl_clamped"] == 0
        assert math.isfinite(row["actor/grad_norm"])


def test_remax_with_tokens_left_out_by_their_covariance(tmp_path: Path) -> None:
    finish(
        tmp_path,
        *(override for override in GRPO if "rollout.n" not in override),
        TWO_STEPS,
        "algorithm=remax",
        f"custom_reward_function.path={Path(__file__).parent / 'length_reward.py'}",
        f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        f"{ACTOR}.policy_loss.clip_cov_ratio=0.2",
        f"{ACTOR}.policy_loss.clip_cov_lb=-100",
        f"{ACTOR}.policy_loss.clip_cov_ub=100",
    )
    for row in rows(tmp_path):
        assert 0 < row["actor/cov_selected"] <= 0.2
        assert row["timing/baseline_gen"] > 0
        assert row["actor/grad_norm"] > 0
