"""Views of a run in a terminal: the live lines of `invrl train` and the screen of
`invrl watch`.

Start with `progress.py` and `watch_screen.py`.
"""
