"""Write docs/reference/commands.md and docs/reference/exit-codes.md from the commands and the error classes.

Usage: tools/reference_pages.py [--check]

With --check nothing is written. The exit code is 1 if a file is not current.
"""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from persia.cli.main import app as persia
from persia.launch.cli import app as launcher
from persia.runtime import errors, exit_codes

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
ARGS = ROOT / "rust_core" / "server" / "src" / "args.rs"
BINARIES = {
    "persia-embedding-sharded-server": ("CommonArgs", "ServerArgs"),
    "persia-embedding-sharded-middleware": ("CommonArgs", "MiddlewareArgs"),
}
"""The programs in Rust, and the structures with their options."""

_FIELD = r"((?: {4}/// [^\n]*\n)+) {4}#\[arg\((.*?)\)\]\n {4}pub (\w+):"

COMMANDS = """# Commands

<!-- Written by tools/reference_pages.py from the commands themselves. Change those, and run it. -->

Each command prints its options with `--help`. An option overrides its [variable](variables.md).
[exit-codes.md](exit-codes.md) lists how commands end.
"""

EXIT_CODES = """# Exit codes

<!-- Written by tools/reference_pages.py from persia.runtime.exit_codes and persia.errors. Change those, and run it. -->

All processes of a job use these codes. [running.md](../running.md#exit-codes) lists the causes of each code, the
codes of signals, and what restarts a process.

| code | name | |
|---|---|---|
"""

CLASSES = """
## Errors

Each class of `persia.errors` has the attribute `exit_code`. A command, a launcher or a rank that ends with an error of
a class ends with its code.

| error | code | |
|---|---|---|
"""


def commands() -> str:
    """Return the text of commands.md."""
    parts = [COMMANDS]
    for app, name in ((persia, "persia"), (launcher, "persia-launcher")):
        parts += _command(get_command(app), name, None)
    structures = _structures(ARGS.read_text(encoding="utf-8"))
    for name, sources in BINARIES.items():
        rows = [row for source in sources for row in structures[source][1]]
        parts.append(f"## {name}\n\n{structures[sources[-1]][0]}\n\n{_table('option', rows)}")
    return "\n".join(parts)


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    """Yield the section of a command, then those of its own commands."""
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"## {name}\n\n{_paragraphs(command.help or '')}\n\n```\n{usage}\n```\n"
    records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None and not {"--help"} & {*param.opts}:
            records[param.param_type_name].append((record[0], _line(record[1])))
    yield from (_table(kind, rows) for kind, rows in records.items() if rows)
    inner = getattr(command, "commands", {})
    for each in command.list_commands(context) if inner else ():
        if not inner[each].hidden:
            yield from _command(inner[each], f"{name} {each}", context)


def _structures(source: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Return the options of each structure of ``args.rs``, with the text of the structure."""
    found = {}
    structure = r"((?:^/// [^\n]*\n)*)(?:^#\[[^\n]*\n)*^pub struct (\w+) \{\n(.*?)^\}"
    for text, name, body in re.findall(structure, source, re.MULTILINE | re.DOTALL):
        rows = []
        for lines, given, field in re.findall(_FIELD, body, re.DOTALL):
            option = f"--{field.replace('_', '-')}"
            if value := re.search(r'value_name = "([^"]+)"', given):
                option += f" {value.group(1)}"
            said = _line(re.sub(r"^ *///", "", lines, flags=re.MULTILINE))
            if default := re.search(r'default_value(?:_t)? = "?([\w.]+)', given):
                said += f"  [default: {default.group(1)}]"
            if variable := re.search(r'env = "(\w+)"', given):
                said += f"  [env var: {variable.group(1)}]"
            rows.append((option, said))
        found[name] = (_line(re.sub(r"^///", "", text, flags=re.MULTILINE)), rows)
    return found


def _table(kind: str, rows: list[tuple[str, str]]) -> str:
    shown = (f"| `{name.replace('|', chr(92) + '|')}` | {text} |" for name, text in rows)
    return "\n".join([f"| {kind} | |", "|---|---|", *shown, ""])


def _line(text: str) -> str:
    """Return a text on one line, with the special characters of Markdown escaped, except in code."""
    parts = re.split(r"(``?[^`]+``?)", " ".join(text.split()))
    marks = r"([*<|]|(?<!\w)_|_(?!\w))"
    return "".join(part.replace("``", "`") if part.startswith("`") else re.sub(marks, r"\\\1", part) for part in parts)


def _paragraphs(text: str) -> str:
    return "\n\n".join(_line(each) for each in inspect.cleandoc(text).split("\n\n"))


def exits() -> str:
    """Return the text of exit-codes.md."""
    said = _docstrings(Path(exit_codes.__file__).read_text(encoding="utf-8"))
    codes = "\n".join(f"| {each.value} | `{each.name}` | {_line(said[each.name])} |" for each in exit_codes.ExitCode)
    classes = [getattr(errors, name) for name in errors.__all__]
    rows = [
        f"| `{each.__name__}` | {each.exit_code} | {_line((inspect.getdoc(each) or '').partition(chr(10) * 2)[0])} |"
        for each in sorted(classes, key=lambda each: (each.exit_code, each.__name__))
    ]
    return "\n".join([EXIT_CODES.rstrip("\n"), codes, CLASSES.rstrip("\n"), *rows, ""])


def _docstrings(source: str) -> dict[str, str]:
    """Return the texts that follow the members of ``ExitCode``."""
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    return {
        before.targets[0].id: str(after.value.value)
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


PAGES = {"commands.md": commands, "exit-codes.md": exits}


def main() -> int:
    """Write or check the files."""
    check = "--check" in sys.argv[1:]
    code = 0
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path}: not current; run tools/reference_pages.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
