"""`invrl view`: the page of a run, live or dead, and its export.

The viewer reads the files of a run folder and never writes there. What it computes lies
in a private index in the user's cache folder. It knows nothing of Ray, torch or an
engine."""
