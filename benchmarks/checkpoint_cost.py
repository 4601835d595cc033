"""What the checksums of a checkpoint cost beside saving and loading it.

    python -m benchmarks.checkpoint_cost --model-path MODEL --out FILE
    [--repetitions N]

Saves and loads a real checkpoint of the model (trainer rank on Ray, Megatron's files
and the Hugging Face folder), step by step as `Checkpoints.save` and a resume do it. The
check is measured twice: with the files in the page cache, as after a crash of the run
alone, and without (the kernel is asked to drop them)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from invrl.host.ray.ray_setup import prepare_ray
from invrl.run.settings.config import Config, Source, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.store.run_folder import RunFolder

Seconds = dict[str, float]


@contextmanager
def _timed(seconds: Seconds, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begun


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _hash(num_bytes: int) -> None:
    """What the checksums cost while so many bytes are written."""
    import xxhash

    digest = xxhash.xxh3_128()
    block = bytes(8 << 20)
    for _ in range(num_bytes // len(block)):
        digest.update(block)


def _flush(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _drop_from_cache(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def measure(config: Config, folder: RunFolder, repetitions: int) -> list[Seconds]:
    """Seconds of each part, once per repetition, and the bytes of a checkpoint."""
    from invrl.run.processes.cluster import start_trainer
    from invrl.store.manifest import check_manifest, write_manifest

    rows = []
    async with start_trainer(config, folder) as trainer:
        for number in range(repetitions):
            row: Seconds = {}
            place = folder.checkpoints_path / f"measured-{number}"
            place.mkdir(parents=True)
            with _timed(row, "save_megatron_s"):
                state = await trainer.save_checkpoint(str(place / "megatron"))
            with _timed(row, "save_hugging_face_s"):
                model = await trainer.export_hugging_face(str(place / "hugging_face"))
            entries = {f"megatron/{name}": entry for name, entry in state.items()}
            entries |= {f"hugging_face/{name}": entry for name, entry in model.items()}
            with _timed(row, "hash_in_memory_s"):
                _hash(sum(entry.bytes for entry in entries.values()))
            with _timed(row, "manifest_write_s"):
                write_manifest(place, entries)
            with _timed(row, "flush_s"):
                _flush(place)
            with _timed(row, "check_cached_s"):
                row["bytes"] = check_manifest(place)
            _drop_from_cache(place)
            with _timed(row, "check_from_disk_s"):
                check_manifest(place)
            with _timed(row, "load_s"):
                await trainer.load_checkpoint(str(place / "megatron"))
            row["files"] = len(_files(place))
            shutil.rmtree(place)
            rows.append(row)
    return rows


def summary(rows: list[Seconds]) -> Seconds:
    """Medians, and shares of the whole save and the whole load."""
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    saving = ("save_megatron_s", "save_hugging_face_s", "manifest_write_s", "flush_s")
    save_s = sum(median[name] for name in saving)
    return {
        **median,
        "save_s": save_s,
        "checksum_share_of_save": (
            median["hash_in_memory_s"] + median["manifest_write_s"]
        )
        / save_s,
        "check_cached_share_of_load": median["check_cached_s"]
        / (median["check_cached_s"] + median["load_s"]),
        "check_from_disk_share_of_load": median["check_from_disk_s"]
        / (median["check_from_disk_s"] + median["load_s"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    prepare_ray()
    with tempfile.TemporaryDirectory(prefix="invrl-checkpoint-cost-") as root:
        tables = {
            "run": {"run_root": root, "run_name": "run"},
            "model": {"model_path": options.model_path},
        }
        config = resolve(Source(name="bench", tables=tables))
        load_before = os.getloadavg()[0]
        rows = asyncio.run(
            measure(config, make_run_folder(config), options.repetitions)
        )
    result = {
        "model": Path(options.model_path).name,
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": round(load_before, 2),
        "repetitions": rows,
        "summary": summary(rows),
    }
    text = json.dumps(result, indent=2) + "\n"
    options.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
