"""UTF-8 in every process of ours, in every locale.

Our own code names the encoding of each file. Libraries and user code often do not:
under a locale such as en_US.ISO-8859-1 a template's full-width characters would
silently become other tokens. A command therefore runs in Python's UTF-8 mode, as does
everything that it starts.
"""

import codecs
import locale
import os
import sys
from io import TextIOWrapper

_MODE = "PYTHONUTF8"
_TERMINALS_OF_UTF8 = ("utf-8", "ascii")
"""An ASCII locale says nothing about the terminal: containers often have no other."""


def use_utf8() -> None:
    """Restart the command in UTF-8 mode at its beginning, if the locale has another
    encoding.

    Afterwards `print` never raises: a terminal of another encoding gets escapes for
    characters that it lacks.
    """
    if (
        locale.getpreferredencoding(False).lower() != "utf-8"
        and os.environ.get(_MODE) != "1"
    ):
        os.environ[_MODE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            encoding = None
            if (
                stream.isatty()
                and codecs.lookup(locale.getencoding()).name not in _TERMINALS_OF_UTF8
            ):
                encoding = locale.getencoding()
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
