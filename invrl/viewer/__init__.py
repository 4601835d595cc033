"""`invrl view`: the page of a run, live or dead, and its export.

The viewer reads the files of a run folder and never writes there. Its computed data is
in a private index in the user's cache folder. It imports neither Ray nor torch.
"""
