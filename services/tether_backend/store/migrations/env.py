"""Alembic's environment: it runs inside the transaction that `store.engine` opened and locked."""

from alembic import context

from tether_backend.store.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
)
context.run_migrations()
