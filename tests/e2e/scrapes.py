"""What a run showed to a Prometheus that scrapes it as
`launch/prometheus/prometheus.yml` says."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import yaml
from metric_queries import SCRAPE, scraped

from invrl.observe.metrics.metrics_server import PATH

INTERVAL_S = 1.0
ANSWER_S = 10.0


def scrape_paths() -> list[str]:
    """Of every job of the scrape configuration."""
    jobs = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    return [job.get("metrics_path", PATH) for job in jobs]


@dataclass(slots=True)
class Scrapes:
    """Of one run. Lists and mappings are by path."""

    port: int
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Of every answer, in their order. Nothing is noted while nobody listens."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    """The answers with status 200."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Scrapes within the block."""
        over = threading.Event()
        thread = threading.Thread(target=self._scrape, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _scrape(self, over: threading.Event) -> None:
        while not over.wait(INTERVAL_S):
            for path in scrape_paths():
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    status, text = self._get(path)
                    self.statuses.setdefault(path, []).append(status)
                    if status == 200:
                        self.texts.setdefault(path, []).append(text)

    def _get(self, path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(
                f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_S
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def served(self) -> dict[str, set[str]]:
        """The names of all samples of all paths, each with its labels. Raises
        ValueError for an answer that is not in Prometheus' format."""
        names: dict[str, set[str]] = {}
        for texts in self.texts.values():
            for text in texts:
                for name, labels in scraped(text).items():
                    names.setdefault(name, set()).update(labels)
        return names


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return probe.getsockname()[1]
