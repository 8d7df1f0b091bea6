"""Webhooks: what waits for a human and what has ended, told to configured addresses, at least once with a stable id.

    the log ──durable consumer `webhooks`──▶ watcher ──create-only──▶ tether_notifications ──▶ deliverer ──▶ POST

One process of a tenant's backends does this, by lease. A record is created before its message is acked, and only if it
does not exist: redelivery, a consumer that was deleted, a projection that is rebuilt and another backend with another
database all meet the record that is there. A delivery whose answer was lost is repeated under the same id: receivers
drop what they know by `webhook-id`.
"""
