"""Code that comes with a model is never run, whatever a terminal answers."""

from __future__ import annotations

import ast
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

from trainer.models import resolve

ROOT = Path(__file__).parents[2]
MODULE = "from pathlib import Path\nPath(__file__)\nopen({marker!r}, 'w').close()\n"
LOAD = """
import sys
import torch
from trainer.base.errors import UserError
from trainer.models import load_model
for path in sys.argv[1:]:
    try:
        load_model(path, dtype=torch.float32, device="cpu")
        print("loaded")
    except UserError as error:
        print(error)
"""


def model_with_code(folder: Path, marker: Path, where: str) -> Path:
    """The built-in model, with an ``auto_map`` in its config or its tokenizer's."""
    shutil.copytree(resolve("builtin:tiny"), folder)
    (folder / "evil.py").write_text(MODULE.format(marker=str(marker)))
    name = "config.json" if where in ("config", "weights") else "tokenizer_config.json"
    values = json.loads((folder / name).read_text())
    if where == "config":
        values |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    elif where == "weights":
        values |= {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    else:
        values |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (folder / name).write_text(json.dumps(values))
    return folder


def on_a_terminal(command: list[str], typed: bytes) -> str:
    """Output of a command whose stdin is a terminal on which ``typed`` is already waiting."""
    leader, follower = pty.openpty()
    os.write(leader, typed)
    try:
        with subprocess.Popen(
            command, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            output = b""
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                if select.select([process.stdout], [], [], 1.0)[0]:
                    data = os.read(process.stdout.fileno(), 65536)
                    if not data:
                        break
                    output += data
            process.kill()
    finally:
        os.close(leader)
        os.close(follower)
    return output.decode()


def test_yes_on_a_terminal_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    folders = [
        model_with_code(tmp_path / where, marker, where)
        for where in ("config", "tokenizer", "weights")
    ]
    command = [sys.executable, "-c", LOAD, *map(str, folders)]
    output = on_a_terminal(command, b"y\n" * 20)
    assert not marker.exists(), output
    refused = "needs Python code that comes with it (auto_map), which is never run"
    assert output.count(refused) == 2, output
    assert output.count("actor_rollout_ref.model.trust_remote_code=false") == 2
    assert output.endswith("loaded\n"), output  # transformers has code of its own for this one
    assert "[y/N]" not in output


def test_every_loading_call_says_so() -> None:
    silent = []
    for package in ("trainer", "jobs", "benchmarks", "containers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if node.func.attr == "from_pretrained" and (
                    said.get("trust_remote_code") != "False"
                ):
                    silent.append(f"{path}:{node.lineno}")
    assert not silent
