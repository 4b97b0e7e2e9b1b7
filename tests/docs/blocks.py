"""The blocks of code and commands on a page of Markdown, fenced or indented, in the order in which they stand."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

SHELL = ("sh", "shell", "bash", "console")
COMMANDS_END = ("&&", "||", ";")


@dataclass(frozen=True)
class Block:
    """Lines of a page that are not prose: the number of the first, and what they are written in."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """All blocks of a page; one that does not say its language has that which it can be read as."""
    return [Block(page, line, language or _language_of(code), code) for line, language, code in _found(text)]


def _found(text: str) -> Iterator[tuple[int, str, str]]:
    """First line, language if there is one, and text of every block."""
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        begun = place
        if fence := re.match(r" *(?:(?:[-*+]|\d+[.)]) +)?(```+|~~~+) *(\w*)", lines[place]):
            place += 1
            while place < len(lines) and not lines[place].lstrip().startswith(fence[1]):
                place += 1
            yield begun + 2, fence[2], dedent("\n".join(lines[begun + 1 : place])) + "\n"
        elif lines[place].startswith("    "):
            while place + 1 < len(lines) and (lines[place + 1].startswith("    ") or not lines[place + 1].strip()):
                place += 1
            yield begun + 1, "", dedent("\n".join(lines[begun : place + 1])).strip("\n") + "\n"
        place += 1


def _language_of(code: str) -> str:
    """What a block that does not say so is written in; what is nothing else is for a shell, which may refuse it."""
    for language, read in (("toml", tomllib.loads), ("python", ast.parse)):
        try:
            read(code)
        except (tomllib.TOMLDecodeError, SyntaxError):
            continue
        return language
    return "sh"


def lines_of(block: Block) -> list[tuple[int, str]]:
    """The commands of a block for a shell with their line numbers; one may go on after a backslash."""
    found: list[tuple[int, str]] = []
    going_on = False
    for number, line in enumerate(block.text.splitlines(), block.line):
        if going_on:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append((number, line.strip().removeprefix("$ ")))
        going_on = line.endswith("\\") and bool(found)
        if going_on:
            found[-1] = (found[-1][0], found[-1][1].removesuffix("\\").rstrip())
    return found


def words_of(line: str) -> list[list[list[str]]]:
    """The words of a line: its commands one after the other, each of them the parts of a pipe.

    Comments, and options of a synopsis that stand between brackets, are left out.
    """
    reader = shlex.shlex(re.sub(r"\[--[^\]]*\]", "", line), posix=True, punctuation_chars=True)
    reader.whitespace_split, reader.commenters = True, "#"
    commands: list[list[list[str]]] = [[[]]]
    for word in reader:
        if word in COMMANDS_END:
            commands.append([[]])
        elif word == "|":
            commands[-1].append([])
        else:
            commands[-1][-1].append(word)
    return commands
