"""``python -m trainer.config.verl SCRIPT.sh``: what each setting of a script for verl becomes here.

It ends with a command line for ``python -m trainer``. The script is read, never run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.command import run_command
from trainer.base.errors import EXIT_OK, EXIT_USER, UserError
from trainer.config.verl.script import Script, read_script
from trainer.config.verl.translate import Outcome, Translation, translate

MAX_BYTES = 1_000_000
"""Largest script that is read."""
HEADINGS: dict[Outcome, str] = {
    "taken": "Taken",
    "accepted": "Accepted, changes nothing here",
    "refused": "Not supported",
    "unknown": "Unknown",
}


def main(arguments: Sequence[str]) -> int:
    """Print the translation of a script. Returns 0, or 2 when a setting has no counterpart here."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    """Raises UserError for what is no script for verl."""
    parser = argparse.ArgumentParser(prog="python -m trainer.config.verl", description=__doc__)
    parser.add_argument("script", type=Path, help="a shell script that starts verl")
    options = parser.parse_args(arguments)
    script = read_script(_text_of(options.script))
    if not script.settings:
        raise UserError(
            f"{options.script} holds no settings KEY=VALUE of verl; give the script that runs "
            "python -m verl.trainer.main_ppo"
        )
    translations = translations_of(script)
    sys.stdout.write(report(translations) + "\n")
    wrong = any(found.outcome in ("refused", "unknown") for _, found in translations)
    return EXIT_USER if wrong else EXIT_OK


def translations_of(script: Script) -> list[tuple[str, Translation]]:
    """Each setting of the script as typed, and what it is here; of a key given twice the last."""
    last: dict[str, tuple[str, Translation]] = {}
    for typed in script.settings:
        key, _, value = typed.lstrip("+~").partition("=")
        found = translate(key, value)
        last.pop(found.key, None)
        last[found.key] = (typed, found)
    if script.is_sft:
        last["trainer.mode"] = ("verl's SFT trainer", translate("trainer.mode", "sft"))
    return list(last.values())


def report(translations: Sequence[tuple[str, Translation]]) -> str:
    """The table of all settings, by what becomes of them, and the command line."""
    lines: list[str] = []
    for outcome, heading in HEADINGS.items():
        rows = [(typed, found) for typed, found in translations if found.outcome == outcome]
        if not rows:
            continue
        lines += [f"{heading} ({len(rows)})", *(f"  {_row(*row)}" for row in rows), ""]
    taken = [found for _, found in translations if found.outcome == "taken"]
    words = [shlex.quote(f"{found.key}={found.value}") for found in taken]
    lines.append("python -m trainer \\\n    " + " \\\n    ".join(words))
    unset = sorted({found.key for found in taken if "$" in found.value})
    if unset:
        lines.append(f"\nValues that only the script's caller knows: set {', '.join(unset)}.")
    return "\n".join(lines)


def _row(typed: str, found: Translation) -> str:
    here = f"{found.key}={found.value}"
    if found.outcome != "taken":
        return f"{typed}: {found.reason}"
    return typed if typed == here else f"{typed}  ->  {here}"


def _text_of(path: Path) -> str:
    """The text of a script. Raises UserError when it can't be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); give a shell script") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} is larger than {MAX_BYTES} bytes; give a shell script")
    return data.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
