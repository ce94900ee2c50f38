"""``python -m trainer.plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from trainer.base.errors import UserError
from trainer.base.model_shape import ModelShape
from trainer.plan import memory
from trainer.plan.__main__ import main
from trainer.plan.lengths import measure
from trainer.plan.options import split_options

QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
BATCH = (
    "data.train_batch_size=512",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=16",
    "parallel=dp8",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plan"])

    def run(*argv: str) -> tuple[int, str, str]:
        return main(list(argv)), *capsys.readouterr()

    return run


def test_the_worked_example_and_the_budget_of_the_documents(plan):
    code, out, err = plan(
        *BATCH, "plan.tp=2", "plan.pp=2", "plan.mean_prompt=210", "plan.mean_response=380"
    )
    assert (code, err) == (0, "")
    for part in (
        "dp 2",
        "1024 a rank",
        "128 of 8 sequences",
        "4 an iteration",
        "16384 = (210 + 380) * 24 = 14160",
    ):
        assert part in out


def test_a_7b_model_on_the_users_data(plan, tmp_path: Path, model: Path):
    rows = [{"prompt": "x" * 400, "response": "y" * 800}] * 50
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = (
        "experiment=math_7b",
        f"actor_rollout_ref.model.path={model}",
        "data.train_files=t.jsonl",
    )
    code, out, err = plan(
        *argv, "plan.step_time_s=90", "plan.steps=100", "plan.write_gb_s=2", "plan.gpu_gb=40"
    )
    assert (code, err) == (0, "")
    for part in (
        "7,615.3 M",
        "50 rows",
        "100 + 200 tokens",
        "20.00 = 100 * 90 s * 8",
        "of 40 GB: DOES NOT FIT: lower",
    ):
        assert part in out


def test_what_does_not_divide_is_said_at_once_with_code_2(plan, model: Path):
    code, out, err = plan(*BATCH, f"actor_rollout_ref.model.path={model}", "plan.tp=3", "plan.pp=3")
    assert (code, out) == (2, "")
    for part in (
        "tp=3 does not divide the model's 28",
        "pp=3 does not divide the model's 28 layers",
        "world=8 is not",
    ):
        assert part in err
    assert "Traceback" not in err


def test_wrong_options():
    with pytest.raises(
        UserError, match=r"plan.step_time; did you mean 'step_time_s'.*\n.*pp=a: expected a whole"
    ):
        split_options(["plan.step_time=1", "plan.pp=a"])
    assert split_options(["data.seed=1", "plan.tp=2"])[1] == ["data.seed=1"]


def test_parameters_of_a_published_model(model: Path):
    assert ModelShape.from_folder(model).params == pytest.approx(7.616e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "no config of a decoder"), (None, "can't be read")]
)
def test_no_model_config(tmp_path: Path, text: str | None, message: str):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        ModelShape.from_folder(tmp_path)


SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=100)


def predict(**changes: object) -> memory.MemoryEstimate:
    base = dict(
        dp=4,
        zero_stage=1,
        precision="bf16",
        micro_batch_tokens=64,
        recompute=False,
        reference=False,
        kv_tokens=0,
    )
    return memory.predict(SHAPE, **{**base, **changes})


def test_sharding_divides_what_its_stage_says():
    p = SHAPE.params
    none, one, two, three = (predict(zero_stage=stage) for stage in range(4))
    assert (none.weights, none.gradients, none.optimizer) == (2 * p, 4 * p, 12 * p)
    assert (one.optimizer, one.gradients) == (3 * p, 4 * p)
    assert (two.gradients, two.weights) == (p, 2 * p)
    assert three.weights == p // 2


def test_offload_moves_and_recomputation_saves():
    assert predict(optimizer_offload=True).host == predict().optimizer
    assert predict(optimizer_offload=True).optimizer == 0
    assert predict(recompute=True).activations < predict().activations
    assert predict(reference=True).reference == predict().weights


def test_checkpoint_holds_weights_moments_and_master_copy():
    assert memory.checkpoint_bytes(SHAPE, precision="bf16", zero_stage=1) == 14 * SHAPE.params
    assert memory.checkpoint_bytes(SHAPE, precision="fp32", zero_stage=0) == 12 * SHAPE.params


def test_predicted_save_time() -> None:
    short = memory.predicted_save_s(10**8, bytes_per_s=1e9)
    assert memory.predicted_save_s(5 * 10**9, bytes_per_s=1e9, commit_s=2.0) == 7.0
    assert memory.predicted_save_s(10**9, bytes_per_s=1e9) > short


def test_adapters_are_what_has_gradients_moments_and_a_place_in_a_checkpoint():
    adapters = memory.adapter_params(SHAPE, 4, "all-linear")
    assert adapters == 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert memory.adapter_params(SHAPE, 4, ["v_proj"]) == 4 * 2 * (64 + 32)
    assert memory.adapter_params(SHAPE, 0, "all-linear") == 0
    found = predict(zero_stage=0, reference=True, adapters=adapters)
    assert (found.gradients, found.optimizer, found.reference) == (4 * adapters, 12 * adapters, 0)
    assert found.weights == 2 * (SHAPE.params + adapters)
    assert (
        memory.checkpoint_bytes(SHAPE, precision="bf16", zero_stage=1, adapters=adapters)
        == 14 * adapters
    )


def test_lengths_name_what_the_file_has(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"question": "a"}\n')
    with pytest.raises(
        UserError, match=r"data.prompt_key=prompt: .*t.jsonl has no such field; it has question"
    ):
        measure(str(file), "prompt", "response", None)
    with pytest.raises(UserError, match=r"data\.train_files: there is no file"):
        measure(str(tmp_path / "no.jsonl"), "prompt", "response", None)
    file.write_text("{\n")
    with pytest.raises(UserError, match=r"t\.jsonl, row 1: not valid JSON"):
        measure(str(file), "prompt", "response", None)


def test_lengths_of_parquet_and_chats(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    chat = [{"role": "user", "content": "x" * 40}]
    parquet.write_table(
        pyarrow.table({"prompt": [chat] * 3, "response": ["y" * 8] * 3}), tmp_path / "t.parquet"
    )
    found = measure(str(tmp_path), "prompt", "response", None)
    assert (found.rows, found.mean_prompt, found.mean_response, found.longest) == (3, 10, 2, 12)


def test_lengths_of_conversations_and_contents_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x" * 30}, {"type": "text", "text": "x" * 10}]
    talk = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "y" * 20},
        {"role": "user", "content": "z" * 10},
        {"role": "assistant", "content": "y" * 8},
    ]
    file = tmp_path / "t.jsonl"
    rows = [{"messages": talk}, {"messages": talk[:1], "response": talk[1:]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = measure(str(file), "messages", "response", None)
    assert (found.mean_prompt, found.mean_response, found.longest) == (10, 10, 20)


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".parquet", ".arrow"])
def test_the_plan_reads_every_file_that_the_trainer_reads(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "x" * 40, "response": "y" * 20}] * 5
    file = tmp_path / f"x{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps(rows))
    elif suffix in (".jsonl", ".ndjson"):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pyarrow.Table.from_pylist(rows)
        if suffix == ".parquet":
            parquet.write_table(table, file)
        else:
            with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
                writer.write_table(table)
    for name in (str(file), str(tmp_path)):
        found = measure(name, "prompt", "response", None)
        assert (found.rows, found.mean_prompt, found.mean_response) == (5, 10, 5)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match=r"tokenizer\.json is no usable tokenizer .*: copy its fil"):
        measure(str(tmp_path / "data.jsonl"), "prompt", "answer", tmp_path / "tokenizer.json")
