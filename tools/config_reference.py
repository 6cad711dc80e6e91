"""Write docs/configuration.md, the reference of persia.yml, from its typed blocks.

Usage: tools/config_reference.py [--check]

With --check nothing is written. The exit code is 1 if the file is not current.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from persia.config.blocks import RESERVED, Config, ModelBlock, OptimizerBlock
from persia.config.models import MODELS, arguments_of
from persia.config.optimizers import OPTIMIZERS
from persia.config.render import flow
from persia.config.values import COMPUTED, REQUIRED, Argument
from persia.runtime.yaml_tree import node_of

FILE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# persia.yml

<!-- Written by tools/config_reference.py from the typed blocks of persia.config. Change those, and run it. -->

One file describes data, features, model and training. `data`, `features` and `labels` are required:

```yaml
data:
  train: clicks.parquet
features:
  user:  {type: id, dim: 16}
  price: {type: dense, log1p: true, standardise: true}
labels:
  clicked: {}
```

```sh
persia config check persia.yml                            # every error, with line and column
persia config show persia.yml --set train.seed=7          # all keys with defaults, and the source of each value
```

```python
config = persia.load_config("persia.yml", ["train.seed=7"])  # a ConfigError lists all errors
is_valid, errors = persia.config.validate_config("persia.yml")
```

* **`--set KEY=VALUE`** changes or adds a key. `KEY` is a path such as `train.dense_optimizer.lr`. `VALUE` is YAML. The
  option can be repeated. If a key is set twice, the last value is used.
* **`persia config check`** accepts `persia.yml`, `embedding_config.yml` and `global_config.yml` together, in any order,
  and recognizes each by its blocks. It compares the slots of `persia.yml` with those of `embedding_config.yml`. Without
  arguments, it checks the files that a job in this folder would read. It also checks that the data of `persia.yml` has
  the columns that are read, with suitable types. It reads no rows. A data file that does not exist causes only a
  warning. `--no-data` omits this check.
* **Slots.** A script takes its slots from `PERSIA_CONFIG=persia.yml` or from
  `PERSIA_EMBEDDING_CONFIG=embedding_config.yml`. Setting both variables is an error. If neither is set, the slots are
  those of `config/embedding_config.yml` next to the script or in the working directory. Capacity and other limits of a
  job are in [`global_config.yml`](running.md).
* **Values.** A number may be written as `1000000`, `1_000_000` or `1e6`. Booleans are `true` and `false`, whereas
  `yes` and `on` are strings. A string that looks like a number, `true`, `false` or `null` needs quotes, and so does a
  string for which YAML requires them, such as one with `: ` or ` #`. `null`, or no value, means "not set". An alias
  (`*name`) repeats the value of its anchor (`&name`). Merge keys (`<<`) and tags (`!name`) are refused.
* **Features and labels.** `config show` prints them as they are in the file, without defaults.
  [transforms.md](transforms.md) describes their keys and defaults.
* **The column of a label** cannot be the column of a feature, a weight, a group or a split, because the model would
  then be trained on the label.
"""

TAIL = """## Not in this version

The following blocks are refused, and the error names them: {reserved}.

The key `train.baseline` is refused. The error names the alternative, an option of `persia train`.
"""


def main() -> int:
    """Write or check the file."""
    text = reference()
    if "--check" in sys.argv[1:]:
        if FILE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{FILE}: not current; run tools/config_reference.py", file=sys.stderr)
        return 1
    FILE.write_text(text, encoding="utf-8")
    return 0


def reference() -> str:
    """Return the text of the file."""
    parts = [HEAD]
    for key, field in Config.model_fields.items():
        if key in {"features", "labels"}:
            parts.append(f"## {key}\n\nSee [transforms.md](transforms.md).\n")
        elif (kind := _model_of(field.annotation)) is not None:
            parts.extend(_block(key, kind))
        else:
            parts += [f"## {key}\n", _table({key: Argument.of(field)})]
    parts.append(TAIL.format(reserved=", ".join(f"`{name}`" for name in RESERVED)))
    return "\n".join(parts)


def _block(path: str, block: type[BaseModel]) -> Iterator[str]:
    """Yield the section of a block, then those of the blocks in it."""
    yield f"## {path}\n\n{_markdown(getdoc(block) or '')}\n"
    keys = {field.alias or name: Argument.of(field) for name, field in block.model_fields.items()}
    inner = {key: kind for key, one in keys.items() if (kind := _model_of(one.annotation)) is not None}
    if issubclass(block, ModelBlock):
        default = Config.model_fields[path].default.name
        keys["name"] = Argument(Literal[tuple(MODELS)], (), default, keys["name"].text)
    yield _table({key: one for key, one in keys.items() if key not in inner})
    if issubclass(block, ModelBlock):
        for name in MODELS:
            yield f"### {path}, `name: {name}`\n"
            yield _table(arguments) if (arguments := arguments_of(name)) else f"`{name}` has no other keys.\n"
    for key, kind in inner.items():
        if issubclass(kind, OptimizerBlock):
            yield from _optimizers(f"{path}.{key}", keys[key].default.name)
        else:
            yield from _block(f"{path}.{key}", kind)


def _optimizers(path: str, default: str) -> Iterator[str]:
    yield f"## {path}\n"
    kinds = OPTIMIZERS[path.rpartition(".")[2]]
    names = ", ".join(f"`{name}`" for name in kinds)
    yield f"`name` is one of {names}; without it, it is `{default}`. The other keys are its arguments.\n"
    for name, kind in kinds.items():
        yield f"### {path}, `name: {name}`\n\n{_markdown(getdoc(kind) or '')}\n"
        yield _table({key: Argument.of(field) for key, field in kind.model_fields.items()})


def _table(keys: Mapping[str, Argument]) -> str:
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for key, one in keys.items():
        if not one.text:
            raise SystemExit(f"{key}: no docstring describes it")
        lines.append(f"| `{key}` | {one.allowed} | {_default(one.default)} | {_markdown(one.text)} |")
    return "\n".join([*lines, ""])


def _default(default: Any) -> str:
    if default is REQUIRED:
        return "required"
    return "computed" if default is COMPUTED else f"`{flow(node_of(default))}`"


def _markdown(text: str) -> str:
    """Return a docstring as Markdown on one line."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("None:", "If not set:").replace("|", "\\|")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


if __name__ == "__main__":
    sys.exit(main())
