"""Advice on exceptions that a rollout function raises because it and its client
disagree on who waits, or because it takes a task for its row: sentences for a failure's
detail. Pure."""

import re
from collections.abc import Iterable

from invrl.user_code.frame import describe_exception

_OTHER_LOOP = (
    "an async function runs in the worker's event loop and cannot start another: await the coroutine, or "
    "write the function with def (it then has a thread of its own)"
)
_SYNCHRONOUS = (
    "what is awaited is no coroutine: the client may be a synchronous one. Use an asynchronous one "
    "(endpoint.openai(), AsyncOpenAI), or write the function with def and leave await out"
)
_ADVICE = {
    r"asyncio\.run\(\) cannot be called from a running event loop": (
        "asyncio.run() does not work inside an async function: await the coroutine, or write the function "
        "with def (it then has a thread of its own)"
    ),
    "This event loop is already running": _OTHER_LOOP,
    "Cannot run the event loop while another loop is running": _OTHER_LOOP,
    r"Already running asyncio in this thread": _OTHER_LOOP,
    "can't be used in 'await' expression": _SYNCHRONOUS,
    "'async for' requires": _SYNCHRONOUS,
    "does not support the asynchronous context manager protocol": _SYNCHRONOUS,
    "'coroutine'": (
        "an await is missing: endpoint.openai() is an asynchronous client. Write the function with async "
        "def, and await the call"
    ),
    r"'(async_generator|AsyncStream)' object is not iterable": (
        "the stream is an asynchronous one: write the function with async def, and read it with async for"
    ),
    r"'Async\w+' object does not support the context manager protocol": (
        "the client is an asynchronous one: write the function with async def, and use async with"
    ),
    "'Task' object": (
        "a task has the attributes id, payload and label: the fields of its row are in task.payload, as in "
        'task.payload["question"]'
    ),
}
"""Advice by a pattern in the exception's message."""


def advice_on(errors: Iterable[BaseException]) -> str:
    """Return a sentence about the first of these exceptions that has one; "" if none
    has."""
    for error in errors:
        if not isinstance(error, RuntimeError | TypeError | AttributeError):
            continue
        message = describe_exception(error)
        for pattern, advice in _ADVICE.items():
            if re.search(pattern, message):
                return advice
    return ""
