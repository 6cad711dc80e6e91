"""The tables of an :class:`persia.nn.EmbeddingCollection`."""

from collections.abc import Sequence
from dataclasses import dataclass

from persia.runtime.errors import ConfigError


@dataclass(frozen=True)
class TableConfig:
    """A table and the features that read it. Names are those of torchrec's ``EmbeddingBagConfig``.

    Attributes:
        name: The name of the table.
        embedding_dim: The number of weights of a row.
        feature_names: The features that share the table.
        pooling: How the rows of a sample are combined into one vector: ``sum`` or ``mean``.
        num_embeddings: Accepted for compatibility with torchrec, without effect: ids have 64 bits, and a push inserts
            missing rows.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str = "sum"
    num_embeddings: int | None = None


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Check tables.

    Raises:
        ConfigError: A table is invalid, or two tables contradict each other. The message lists every error.
    """
    wrong = [] if tables else ["no table: pass at least one TableConfig"]
    seen: dict[str, str] = {}
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            wrong.append(f"two tables have the name {table.name!r}: choose different names")
        names.add(table.name)
        if table.pooling not in {"sum", "mean"}:
            wrong.append(f"table {table.name!r}: pooling={table.pooling!r}: expected 'sum' or 'mean'")
        if not table.feature_names or isinstance(table.feature_names, str):
            wrong.append(
                f"table {table.name!r}: feature_names={table.feature_names!r}: expected a list of at least one name"
            )
            continue
        for feature in table.feature_names:
            if feature in seen:
                wrong.append(
                    f"feature {feature!r} is in the tables {seen[feature]!r} and {table.name!r}: "
                    "a feature belongs to one table"
                )
            seen[feature] = table.name
    if wrong:
        hint = "correct the TableConfig that the message names" if tables else ""
        raise ConfigError("EmbeddingCollection: " + "; ".join(wrong), hint=hint)
