"""The settings in a shell script that starts verl. The script is read, never run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)*([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SETTING = re.compile(r"[+~]{0,2}[a-z_]+(?:[.@/][\w.@/-]+)*=.*", re.DOTALL)
_DOTTED = re.compile(r"[+~]{0,2}[a-z_]\w*\.[\w.@/-]+=.*", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\((.*)", re.DOTALL)
_NAME = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\}?")
_PROGRAM = re.compile(r"verl\.trainer\.(\w+)")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
MAX_DEPTH = 20
"""Variables inside variables that are followed."""


@dataclass
class Script:
    """What a shell script hands to verl."""

    settings: list[str] = field(default_factory=list)
    """``key=value`` in their order, variables replaced where the script gives them a value."""
    program: str = ""
    """The module of verl that it starts, such as ``main_ppo``."""

    @property
    def is_sft(self) -> bool:
        """Whether it starts verl's SFT trainer."""
        return "sft" in self.program


def read_script(text: str) -> Script:
    """The settings of the shell script ``text``: words ``key=value`` of its commands and arrays."""
    script = Script()
    variables: dict[str, str] = {}
    text = text.replace("\\\n", " ")
    text = _ARITHMETIC.sub(lambda match: re.sub(r"\s+", "", match.group(0)), text)
    program = _PROGRAM.search(text)
    if program is not None:
        script.program = program.group(1)
    in_array = False
    for line in text.splitlines():
        in_command = "verl.trainer" in line
        for word in _words(line):
            opened = _ARRAY.fullmatch(word)
            if opened is not None:
                in_array = True
                word = opened.group(1)
            closes = in_array and word.endswith(")") and "(" not in word
            _take_word(
                word[:-1] if closes else word,
                script,
                variables,
                is_argument=in_array or in_command,
                is_indented=line[:1].isspace(),
            )
            in_array = in_array and not closes
    return script


def _take_word(
    word: str,
    script: Script,
    variables: dict[str, str],
    *,
    is_argument: bool,
    is_indented: bool,
) -> None:
    """Add a setting to ``script``, or the variable that the word assigns to ``variables``."""
    if _DOTTED.fullmatch(word) or (is_argument and _SETTING.fullmatch(word)):
        script.settings.append(expand(word, variables))
        return
    assigned = _ASSIGNMENT.fullmatch(word)
    if assigned is None or is_argument:
        return
    name, value = assigned.groups()
    # An indented line belongs to a branch: it must not win over what holds without one.
    if not is_indented or name not in variables:
        variables[name] = value


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with the variables that the script sets, their defaults and sums of whole numbers.
    What only the caller's shell knows stays as it is.
    """
    for _ in range(MAX_DEPTH):
        before = text
        text = _VARIABLE.sub(lambda match: _value_of(match, variables), text)
        text = _ARITHMETIC.sub(lambda match: _computed(match, variables), text)
        if text == before:
            break
    return text


def _value_of(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match.group(1) or match.group(2)
    value = variables.get(name, "")
    default = match.group(3)
    own = _VARIABLE.fullmatch(value)
    if own is not None and name in (own.group(1), own.group(2)):
        # NAME=${NAME:-default}: the caller's, or the default
        value = own.group(3) or ""
    if value == "" and default is not None:
        return default
    return value if value else match.group(0)


def _computed(match: re.Match[str], variables: Mapping[str, str]) -> str:
    names = _NAME.sub(lambda name: expand(f"${{{name.group(1)}}}", variables), match.group(1))
    try:
        return str(_number(ast.parse(names, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match.group(0)


def _number(node: ast.expr) -> int:
    """The value of a sum of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("no sum of whole numbers")


def _words(line: str) -> list[str]:
    """The words of a line as the shell splits them; those before a quote that another line ends."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    reader.whitespace_split = True
    reader.commenters = "#"
    words: list[str] = []
    while True:
        try:
            word = reader.get_token()
        except ValueError:
            return words
        if word is None:
            return words
        words.append(word)
