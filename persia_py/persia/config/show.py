"""A complete configuration as YAML, and the source of each value."""

from pathlib import Path

from persia.config.blocks import Config
from persia.config.document import Document
from persia.config.environment import variables_of
from persia.config.reader import FREE
from persia.config.render import Rendered
from persia.runtime.files import is_url
from persia.runtime.settings import settings
from persia.runtime.yaml_tree import NOWHERE, Entries, Items, Node, Place, Scalar, node_of, parse


def show(document: Document) -> str:
    """Return all keys of a document with their defaults. Comments show the source of each value."""

    def comment(place: Place) -> str:
        if place.override:
            return "--set"
        return f"{document.name}:{place.line}" if place.line else "default"

    text = Rendered(document.tree, comment).text
    variables = {} if document.config is None else variables_of(document.config)
    if variables:
        text += "# environment of the ranks, unless it has these variables already:\n"
        text += "".join(f"#   {name}={each.value}  # {each.key}\n" for name, each in variables.items())
    return text


def to_yaml(config: Config) -> str:
    """Return a configuration as the text of a ``persia.yml``: all keys, with absolute paths of data and checkpoints.

    ``load_config`` of the text gives an equal configuration, except for these paths: features and labels are written as
    the file has them, because a string such as ``1e6`` differs from the number.
    """
    values = config.model_dump(by_alias=True)
    described = parse(config.described)
    entries: list[tuple[Scalar, Node]] = []
    for key, value in values.items():
        node = described.get(key) if key in FREE and isinstance(described, Entries) else None
        entries.append((Scalar(NOWHERE, key), node_of(value) if node is None else node))
    tree = Entries(NOWHERE, entries)
    data = tree.at("data")
    for part in ("train", "valid", "test"):
        node = data.get(part)
        if node is not None and not node.is_null:
            data.put(part, _absolute(node, config.folder))
    saves = tree.at("checkpoint").get("dir")
    if saves is not None and not saves.is_null:
        tree.at("checkpoint").put("dir", _absolute(saves, Path.cwd()))
    start = tree.at("train").get("start_from")
    # in a job, a relative start_from is a folder below PERSIA_CKPT_DIR
    if start is not None and not start.is_null and settings.nats_url is None:
        tree.at("train").put("start_from", _absolute(start, config.folder))
    return Rendered(tree).text


def _absolute(node: Node, folder: Path) -> Node:
    if isinstance(node, Items):
        return Items(node.place, [_absolute(item, folder) for item in node.items])
    if isinstance(node, Scalar) and not is_url(node.text):
        return Scalar(node.place, str(folder / Path(node.text).expanduser()), quoted=node.quoted)
    return node
