"""The gateway: the one public port. It knows every session, owns its tokens and records
the samples.

May import `host`, `store` and the engines' client. `types.py` has the types that the
packages inside share; each imports only the packages to the right of its arrow:

    server     the HTTP routes and the processes    -> all of the others
    sessions   opening, rewarding and closing       -> turns, registry, session_record
    turns      match, render, sample, commit        -> rendering, session_record
    dialects   the wire formats                     -> types only
    rendering  messages to ids, text to messages    -> types only

Start with `types.py`, then `turns/turns.py`.
"""
