"""Files that the commands read, and what may happen to them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import ledger
from tests.config.helpers import minimal_settings
from tests.fuzz.cases import BASE, JOBS, Case
from trainer.config import freeze, load

ROWS = [{"prompt": f"what is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
MODEL = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512},
}
OFFSETS = (("a", 0), ("b", 4))
"""Name and first byte of each tensor."""
MODEL_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model.safetensors.index.json", "model-1.safetensors"),
)


def write_all(folder: Path) -> None:
    """One good file of each kind."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "data.json").write_text(json.dumps(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "data.parquet")
    (folder / "model").mkdir()
    _write_model(folder / "model")
    run = folder / "run"
    freeze(load(minimal_settings(trainer__default_local_dir=str(run))), run)
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": n, "time": n, "critic/score/mean": n / 9}) + "\n" for n in (1, 2)
        )
    )
    (run / "job.json").write_text(
        json.dumps({"name": "s/0", "sweep": "s", "launch": "L", "overrides": ["a=1"], "gpus": 1})
    )
    attempt = {"attempt": 1, "launch": "L", "cause": "done", "why": "", "start": 1.0, "end": 2.0}
    (run / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    (run / "logs/attempt_1").mkdir(parents=True)
    (run / "logs/attempt_1/rank_0.log").write_text("one\ntwo\n")
    entry = ledger.Entry(
        **{"name": "s/0", "sweep": "s", "run": str(run), "signature": "S", "overrides": ("a=1",)},
        **{"shape": "1n1c", "gpus": 0, "launch": "L", "phase": "submitted", "job": "7_0"},
    )
    ledger.append(folder / "ledger.jsonl", [entry])


def _write_model(folder: Path) -> None:
    """A model folder with two small tensors, as far as anything but a rank reads it."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"what": 0, "is": 1, "?": 2}, "unk_token": "?"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    for name, value in {
        "config.json": MODEL,
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": "?"},
        "model.safetensors.index.json": index,
    }.items():
        (folder / name).write_text(json.dumps(value))
    tensors = {n: {"dtype": "U8", "shape": [4], "data_offsets": [k, k + 4]} for n, k in OFFSETS}
    header = json.dumps(tensors).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model-1.safetensors").write_bytes(data)


def uses(folder: Path) -> dict[str, list[Case]]:
    """File -> the commands that read it."""
    data = {
        name: [
            Case("plan", (*BASE, "data.task=null", f"data.train_files={folder / name}"), name),
            Case("trainer", (*JOBS, "data.task=null", f"data.train_files={folder / name}"), name),
        ]
        for name in ("data.jsonl", "data.json", "data.parquet")
    }
    model = f"actor_rollout_ref.model.path={folder}/model"
    run = folder / "run"
    book = ("--ledger", str(folder / "ledger.jsonl"))
    words = ["status", "status --json", "logs s/0", "compare", "sync", "cancel s/0", "resubmit s/0"]
    views = [Case("jobs", (*book, *text.split())) for text in words]
    reads = [
        Case("plan", (*BASE, model, "data.task=null", f"data.train_files={folder}/data.jsonl")),
        Case("trainer", (*JOBS, model)),
    ]
    return {
        **data,
        **{f"model/{name}": reads for name in MODEL_FILES},
        "model/config.json": [
            Case("plan", (*BASE, model), "config.json"),
            Case("trainer", (*JOBS, model), "config.json"),
        ],
        "run/config.yaml": [
            Case("trainer", ("--config-path", str(run), f"trainer.default_local_dir={folder}/o")),
            Case("trainer", (*BASE, f"trainer.default_local_dir={run}")),
            Case("plan", ("--config-path", str(run))),
            *views,
        ],
        "run/metrics.jsonl": [Case("trainer", (*BASE, f"trainer.default_local_dir={run}")), *views],
        "run/job.json": views,
        "run/attempts.jsonl": views,
        "run/logs/attempt_1/rank_0.log": views,
        "ledger.jsonl": [*views, Case("trainer", (*JOBS, f"hydra.launcher.ledger={book[1]}"))],
    }


def damages() -> dict[str, Callable[[Path, random.Random], None]]:
    """Name -> what is done to a file."""
    return {
        "cut": lambda path, draw: _change(path, lambda b: b[: draw.randrange(len(b))]),
        "flipped": lambda path, draw: _change(path, lambda b: _flip(b, draw)),
        "empty": lambda path, draw: _change(path, lambda b: b""),
        "zeros": lambda path, draw: _change(path, lambda b: bytes(len(b))),
        "noise": lambda path, draw: _change(path, lambda b: draw.randbytes(len(b))),
        "utf-16": lambda path, draw: _change(path, lambda b: b.decode("latin-1").encode("utf-16")),
        "bad byte": lambda path, draw: _change(path, lambda b: b[:5] + b"\xff" + b[5:]),
        "nested": lambda path, draw: _change(path, lambda b: b"[" * 100_000),
        "number": lambda path, draw: _change(path, lambda b: b"9" * 10_000),
        "digits": lambda path, draw: _change(path, lambda b: _digits(b, draw)),
        "list": lambda path, draw: _change(path, lambda b: b"[1, null, {}]\n" * 3),
        "object": lambda path, draw: _change(path, lambda b: b'{"a": {"b": [NaN, 1e999]}}\n'),
        "long": lambda path, draw: _change(path, lambda b: b + b'{"a": "' + b"x" * 2_000_000),
        "twice": lambda path, draw: _change(path, lambda b: b + b),
        "bomb": lambda path, draw: _change(path, lambda b: _bomb()),
        "folder": lambda path, draw: _replace(path, path.mkdir),
        "pipe": lambda path, draw: _replace(path, lambda: os.mkfifo(path)),
        "circle": lambda path, draw: _replace(path, lambda: path.symlink_to(path.name)),
        "gone": lambda path, draw: path.unlink(),
        "device": lambda path, draw: _replace(path, lambda: path.symlink_to("/dev/zero")),
    }


def _change(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _replace(path: Path, make: Callable[[], None]) -> None:
    path.unlink()
    make()


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _digits(data: bytes, draw: random.Random) -> bytes:
    """Some digit becomes a number that fits nowhere."""
    places = [n for n, byte in enumerate(data) if chr(byte).isdigit()]
    place = draw.choice(places or [0])
    value = draw.choice([b"-1", b"1e999", b"9" * 30, b"NaN", b"null", b'"x"', b"0"])
    return data[:place] + value + data[place + 1 :]


def _bomb() -> bytes:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join(lines).encode()
