"""A Ray of this process, for tests of single actors, which leaves nothing in /tmp."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import ray

from invrl.host.files.temporary_folder import short_folder


@contextmanager
def local_ray() -> Iterator[None]:
    """With two CPUs. If this process has a Ray already, it is that one."""
    if ray.is_initialized():
        yield
        return
    with TemporaryDirectory(
        prefix="invrl-ray-", dir=short_folder(), ignore_cleanup_errors=True
    ) as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
