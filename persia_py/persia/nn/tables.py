"""The tables of an :class:`persia.nn.EmbeddingCollection`."""

from collections.abc import Sequence
from dataclasses import dataclass

from persia.runtime.errors import ConfigError


@dataclass(frozen=True)
class TableConfig:
    """One table, and the features that read it; the names are those of torchrec's ``EmbeddingBagConfig``.

    Attributes:
        name: The name of the table.
        embedding_dim: The number of weights of a row.
        feature_names: Features that share the table.
        pooling: How a sample's rows become one vector: ``sum``, or ``mean`` (which divides by their number).
        num_embeddings: torchrec's; accepted, without effect: ids are any 64 bits, and a push inserts missing rows.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str = "sum"
    num_embeddings: int | None = None


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Check tables.

    Raises:
        ConfigError: They contradict themselves or each other; the message lists every mistake.
    """
    wrong = [] if tables else ["no table: give at least one TableConfig"]
    seen: dict[str, str] = {}
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            wrong.append(f"two tables have the name {table.name!r}: give each its own")
        names.add(table.name)
        if table.pooling not in {"sum", "mean"}:
            wrong.append(f"table {table.name!r}: pooling={table.pooling!r}: want 'sum' or 'mean'")
        if not table.feature_names or isinstance(table.feature_names, str):
            wrong.append(
                f"table {table.name!r}: feature_names={table.feature_names!r}: want a list of one name or more"
            )
            continue
        for feature in table.feature_names:
            if feature in seen:
                wrong.append(
                    f"feature {feature!r} is in the tables {seen[feature]!r} and {table.name!r}: give it one table"
                )
            seen[feature] = table.name
    if wrong:
        raise ConfigError("EmbeddingCollection: " + "; ".join(wrong))
