"""Parts of the loss that few runs need, one file per idea.

Nothing in invrl imports them: a setting names them by import path, as it names user
code, and each has its settings in a table of its own, `[plugin.NAME]`. They are
examples of the Protocols in `invrl/interfaces.py`. None of them imports torch before a
loss is computed: the driver loads them, too."""
