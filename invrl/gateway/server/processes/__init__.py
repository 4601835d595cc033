"""The processes of the gateway: the supervisor, its workers, and what the driver holds
of them."""
