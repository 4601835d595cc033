"""Why a stage failed, as its log tells: out of memory, a kernel that does not build, or
something else."""

import re
from dataclasses import dataclass

_LAST_LINES = 20
_COMPILER_LINES = 25
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"
)
_AMOUNTS = re.compile(
    r"Tried to allocate [\d.]+ \w+|[\d.]+ \w+ is free|[\d.]+ \w+ is allocated by PyTorch"
)
"""What torch says of it."""
_COMPILERS = {
    "nvcc": re.compile(
        r"\bnvcc\b.*(?:error|fatal)|ninja: build stopped|\.cuh?\(\d+\): error"
    ),
    "ptxas": re.compile(r"\bptxas\b.*(?:error|fatal)"),
    "the host's C compiler": re.compile(
        r"\b(?:gcc|g\+\+|cc1plus|ld|collect2)\b.*(?:error|cannot find)|: fatal error: "
    ),
    "Triton": re.compile(
        r"triton\.compiler\.errors|CompilationError|OutOfResources|PassManager::run failed"
    ),
    "torch's Inductor": re.compile(
        r"InductorError|BackendCompilerFailed|LoweringException|NoValidChoicesError"
    ),
}
"""Compiler -> what it says when it fails. The first that is found in the log is
named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    reason: str
    last_lines: tuple[str, ...]


def describe_failure(log: str, smaller: str) -> Failure:
    """`smaller`: what would need less memory."""
    lines = log.splitlines()
    for line in lines:
        if _OUT_OF_MEMORY.search(line):
            amounts = "; ".join(_AMOUNTS.findall(line)) or line.strip()[:300]
            reason = f"out of memory: {amounts}. To need less: {smaller}"
            return Failure(reason=reason, last_lines=tuple(lines[-_LAST_LINES:]))
    for compiler, says in _COMPILERS.items():
        places = [index for index, line in enumerate(lines) if says.search(line)]
        if places:
            end = places[-1] + 1
            said = lines[max(0, end - _COMPILER_LINES) : end + 2]
            return Failure(
                reason=f"a kernel does not build: {compiler} failed",
                last_lines=tuple(said),
            )
    said = [line for line in lines if line.strip()]
    reason = said[-1].strip()[:500] if said else "it said nothing"
    return Failure(reason=reason, last_lines=tuple(lines[-_LAST_LINES:]))
