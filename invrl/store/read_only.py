"""The run's store for those who only look: nothing is written, neither into the file nor beside it.

SQLite would make two files beside a store that nobody has open. So a store without a log of changes, as every
run leaves it that has ended, is opened as one that does not change."""

import sqlite3
from pathlib import Path
from urllib.parse import quote

from invrl.errors import RunStoreError
from invrl.store.schema import check_version

_WAIT_S = 2.0


def open_read_only(path: Path) -> sqlite3.Connection:
    """Raises RunStoreError if there is no store or it cannot be read, DamagedFileError for a store of another
    version."""
    log = path.with_name(f"{path.name}-wal")
    is_closed = not log.exists() or log.stat().st_size == 0
    mode = "immutable=1" if is_closed else "mode=ro"
    try:
        db = sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True, timeout=_WAIT_S)
    except sqlite3.Error as error:
        raise RunStoreError(f"{path} cannot be opened: {error}") from error
    try:
        db.execute("PRAGMA query_only=1")
        if not check_version(db, path):
            raise RunStoreError(f"{path} is empty")
    except sqlite3.Error as error:
        db.close()
        raise RunStoreError(f"{path} cannot be read: {error}") from error
    except BaseException:
        db.close()
        raise
    return db
