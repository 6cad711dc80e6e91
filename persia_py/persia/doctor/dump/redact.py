"""Removes secrets from texts: known secrets, values after the name of a secret, and values that match a pattern."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import yaml

from persia.runtime import tokens
from persia.runtime.errors import AuthError

HIDDEN = "[redacted]"
_WORDS = (
    r"token|secret|passw(?:or)?d|passphrase|(?<![a-z])(?:pass|pwd)(?![a-z_-])|credentials?|signature|cookie|"
    r"(?:api|access|private|account|auth(?:orization)?)[_-]?key(?:[_-]?id)?|(?<=[a-z0-9])[_-]key(?![\w-])"
)
_HINTS = ("token", "secret", "pass", "pwd", "credential", "signature", "cookie", "key")
"""Every name of a secret contains one of these texts."""
_NAME = re.compile(rf"(?i){_WORDS}|(?:^|[_-])key$")
"""Matches names whose values are secrets."""
_LEAST = 6
"""The minimum length of a known secret: shorter secrets would match ordinary text."""
_MOST = 8 << 10
"""The maximum length of a known secret in characters: longer secrets are replaced only after their names."""
_LEAST_LEARNT = 8
"""The minimum length of a configuration value that is replaced in other texts too."""
_LEAST_AFTER_COLON = 6
"""The minimum length of a value after ``name:`` in a log, where the rest may be a sentence."""
_QUOTED = r"(?P<quote>\\{0,3}[\"'])(?P<quoted>(?:(?!(?<!\\)(?P=quote)).)*)"
"""Matches a quoted value up to its closing quote or the end of the line. In JSON inside JSON, quotes are escaped."""
_SPACE = r"(?:\s|\\+[nrt])+"
"""Characters that may separate two words of a known secret: YAML may fold it, and JSON escapes line ends."""
# Each pattern starts at a word, or has a bounded start. The time is therefore linear in the size of the text.
_PAIR = re.compile(
    rf"(?i)(?P<name>(?:{_WORDS})(?=(?P<more>[\w.-]{{0,60}}))(?P=more))"
    r"(?P<between>(?:\\{0,3}[\"'])?\s{0,8}(?P<sign>[:=])\s{0,8}(?:[bru]{1,2}(?=\\{0,3}[\"']))?)"
    rf"(?:{_QUOTED}|(?P<value>[^\s\"',;}}\])]+))"
)
_OPTION = re.compile(
    rf"(?i)(?P<name>(?<![\w-])--[\w-]{{0,40}}(?:{_WORDS})[\w-]{{0,40}})"
    rf"(?P<between>\\{{0,3}}[\"'],\s{{0,80}}|[ =])(?:{_QUOTED}|(?P<value>[^\s\"']+))"
)
_HEADER = re.compile(r"(?i)\b(?P<name>(?:set-)?cookie)(?P<between>\s?:\s?)(?P<value>[^\r\n\"']+)")
"""Matches a header with several values."""
_KEY_LINE = re.compile(r"(?P<start>\s*(?:- +)?(?P<quote>[\"']?)(?P<name>[\w.-]{1,120})(?P=quote)\s*:)(?P<rest>\s.*|)")
"""Matches a line of a configuration that starts with a key."""
_URL = re.compile(r"\b([a-zA-Z][a-zA-Z0-9+.-]{0,20}://)[^\s/@\"']+@")
_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?i)\b(?:bearer|basic) +[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"),
)
_PUSH_TOKEN = re.compile(r"(?:[0-9a-f]{16}/)?\d+/\d+/\d+")
"""Matches the name of a batch in logs, which is not a secret."""
_PLAIN = {"", "null", "~", "none", "true", "false", "(set)", HIDDEN.lower(), "[redacted", "-", "|", "|-", ">", ">-"}
_PLAIN |= {"{", "["}
"""Values that are not secrets: settings without a value, redacted values, characters of the syntax of YAML and JSON."""
_DEPTH = 100
"""The maximum nesting depth of a configuration."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def is_secret(name: str) -> bool:
    """Whether the value of a variable or a key of this name is a secret. The name of a file is not a secret."""
    if name == "PWD":  # the working directory
        return False
    return _NAME.search(name) is not None and not name.lower().endswith(("_file", "_dir", "_path"))


class Redactor:
    """Replaces secrets in texts.

    Args:
        known: The known secrets.

    Attributes:
        count: The number of replacements so far.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.count = 0
        self._known: dict[str, re.Pattern[str] | None] = {}
        for each in known:
            self.learn(each)

    def learn(self, secret: str) -> None:
        """Replace this text in all texts that are redacted later. A very short or very long secret is not recorded."""
        text = secret.strip()
        if text.lower() in _PLAIN or len(text) > _MOST:
            return
        for _ in range(3):  # in its plain form, in JSON, and in JSON inside JSON
            if len(text) >= _LEAST and text not in self._known:
                words = text.split()
                self._known[text] = re.compile(_SPACE.join(map(re.escape, words))) if len(words) > 1 else None
            text = json.dumps(text, ensure_ascii=False)[1:-1]

    def learn_variables(self, variables: Mapping[str, Any]) -> None:
        """Record the values of variables whose names indicate secrets, and passwords in URLs."""
        for name, value in variables.items():
            text = str(value or "")
            if is_secret(name) and not _is_file(text):
                self.learn(text)
            if "://" in text and (password := _password(text)):
                self.learn(password)

    def learn_config(self, text: str) -> None:
        """Record the values of secrets in a YAML configuration, also if the YAML is invalid."""
        with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):  # invalid YAML is still read line by line
            for value in _below_secrets(text):
                if len(value) >= _LEAST_LEARNT and not _is_file(value):
                    self.learn(value)
        count = self.count
        self.text(text, strict=True)
        self.count = count

    def learn_token(self, path: str | Path | None) -> str:
        """Record the secret of a job, and the token of each role. Return the error, or an empty text."""
        if path is None:
            return ""
        try:
            self.learn_secret(tokens.secret(path))
        except AuthError as error:
            return str(error)
        return ""

    def learn_secret(self, content: bytes) -> None:
        """Record the secret of a job, and the token of each role."""
        self.learn(content.decode(errors="replace"))
        for role in get_args(tokens.Role):
            self.learn(tokens.role_token(content, role))

    def text(self, text: str, *, strict: bool = False) -> str:
        """Return a text without secrets.

        Args:
            text: The text.
            strict: Whether the text is a configuration, in which every value after the name of a secret is a secret,
                even a short one.
        """
        for secret, pattern in sorted(self._known.items(), key=lambda each: len(each[0]), reverse=True):
            if pattern is not None:
                text = pattern.sub(self._whole, text)
            elif secret in text:
                self.count += text.count(secret)
                text = text.replace(secret, HIDDEN)
        for pattern in _PATTERNS:
            text = pattern.sub(self._whole, text)
        if "://" in text:
            text = _URL.sub(self._url, text)
        small = text.lower()
        # Most texts contain no name of a secret, and this check is several times faster than the patterns.
        if not any(hint in small for hint in _HINTS):
            return text
        if strict:
            text = "\n".join(self._lines(text.split("\n")))
        for pattern in (_HEADER, _OPTION):
            text = pattern.sub(self._value, text)
        return _PAIR.sub(lambda found: self._pair(found, strict=strict), text)

    def settings(self, node: Any, name: str = "") -> Any:
        """Return settings in which values of secret names are replaced, including those after an option in a list.

        The values are recorded.
        """
        if isinstance(node, dict):
            return {key: self.settings(value, str(key)) for key, value in node.items()}
        if isinstance(node, list):
            after = ["", *(each if isinstance(each, str) and each.startswith("-") else "" for each in node[:-1])]
            return [self.settings(each, option or name) for each, option in zip(node, after, strict=True)]
        text = str(node)
        if text.lower() in _PLAIN or not is_secret(name) or text.startswith("--"):
            return node
        if len(text) >= _LEAST_LEARNT and not _is_file(text):
            self.learn(text)
        return HIDDEN

    def _lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines of a configuration without the values of secret names, on the same and on following lines."""
        inside: int | None = None
        for line in lines:
            own = line.lstrip()
            indent = len(line) - len(own)
            if inside is not None and own and not (indent > inside or (indent == inside and own.startswith("- "))):
                inside = None
            if inside is not None:
                yield f"{line[:indent]}{self._learnt(own)}" if own else line
                continue
            found = _KEY_LINE.fullmatch(line)
            if found is None or not is_secret(found["name"]):
                yield line
                continue
            inside = indent
            rest = found["rest"].strip()
            below = not rest or rest[0] in "|>&!#{["
            yield line if below and len(rest) < 3 else f"{found['start']} {self._learnt(rest)}"

    def _learnt(self, text: str) -> str:
        """Return the replacement for a value of a configuration.

        The value is recorded as a secret if it is long enough.
        """
        value = re.split(r"\s#", text.removeprefix("- "), maxsplit=1)[0].strip().rstrip(",").strip("\"'")
        if value.lower() in _PLAIN or set(value) <= set("[]{}"):
            return text
        if len(value) >= _LEAST_LEARNT:
            self.learn(value)
        self.count += 1
        return HIDDEN

    def _whole(self, found: re.Match[str]) -> str:
        del found
        self.count += 1
        return HIDDEN

    def _url(self, found: re.Match[str]) -> str:
        self.count += 1
        return f"{found[1]}{HIDDEN}@"

    def _value(self, found: re.Match[str]) -> str:
        """Replace the value of a name. Keep the name and the opening quote; the closing quote is not in the match."""
        parts = found.groupdict()
        if not self._hides(parts["name"], parts.get("quoted") or parts["value"] or ""):
            return found[0]
        self.count += 1
        return f"{parts['name']}{parts['between']}{parts.get('quote') or ''}{HIDDEN}"

    def _pair(self, found: re.Match[str], *, strict: bool) -> str:
        value = found["quoted"] or found["value"] or ""
        in_prose = found["sign"] == ":" and not strict and '"' not in found["between"] and "'" not in found["between"]
        if in_prose and found["value"] is not None and len(value) < _LEAST_AFTER_COLON:
            return found[0]
        if strict and len(value) >= _LEAST_LEARNT and self._hides(found["name"], value):
            self.learn(value)  # the value may occur in a log too
        return self._value(found)

    def _hides(self, name: str, value: str) -> bool:
        is_batch = _PUSH_TOKEN.fullmatch(value) is not None
        is_folder = name == "PWD" and value.startswith("/")
        is_named = is_secret(name) or name == "PWD"  # of SMTP_PWD, the name is only PWD
        return is_named and not is_folder and not is_batch and value.lower() not in _PLAIN


def _below_secrets(text: str) -> Iterator[str]:
    """Yield the scalars of a YAML text that are below the name of a secret. Very deep levels are omitted."""
    # For each open collection: whether it is a mapping, and whether it is below the name of a secret.
    open_: list[tuple[bool, bool]] = []
    is_key, secret = False, False  # whether the next node is a key, or below a secret
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.ScalarEvent) and is_key:
            is_key, secret = False, secret or is_secret(event.value)
            continue
        if isinstance(event, yaml.ScalarEvent) and secret:
            yield event.value
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((isinstance(event, yaml.MappingStartEvent), secret))
            if len(open_) > _DEPTH:  # the parsing time grows with the depth
                return
            is_key = open_[-1][0]
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            open_.pop()
        elif not isinstance(event, yaml.NodeEvent):
            continue
        is_mapping, secret = open_[-1] if open_ else (False, False)
        is_key = is_mapping


def _is_file(text: str) -> bool:
    """Whether a value is the name of a file, as for PERSIA_TLS_KEY, and not the secret itself."""
    return text.startswith("/") and os.path.exists(text)  # noqa: PTH110 - the text may be too long for a path


def _password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""
