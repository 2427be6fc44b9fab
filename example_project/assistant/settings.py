"""Settings of the app; where the servers are comes from the environment."""

import os

broker_url = os.environ.get("BROKER_URL", "redis://localhost:6379/0")
result_backend = os.environ.get("RESULT_BACKEND", broker_url)
task_default_queue = os.environ.get("QUEUE", "assistant")
broker_connection_retry_on_startup = True

# Where the leases are: any SQLAlchemy URL of a PostgreSQL (or SQLite) database.
lease_url = os.environ.get("LEASE_URL", "postgresql+psycopg://localhost/assistant")

# Short, so that you need not wait long for a takeover while you try it. For work that runs for
# minutes take the defaults: 90, 30 and 20 seconds, and a reaper pass every 5.
lease_duration = 12
lease_heartbeat_interval = 3
lease_margin = 3
lease_reaper_interval = 2

# A payment is worth more patience than a model call.
lease_policies = {
    "payment": {"lease_duration": 20, "lease_heartbeat_interval": 5, "lease_margin": 6},
}
