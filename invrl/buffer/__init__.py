"""From tasks to training batches: the pure state machine (`buffer.py`), its process (`buffer_actor.py`,
`buffer_handle.py`), and the step from taken groups to training rows (`batching.py`)."""
