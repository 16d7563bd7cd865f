"""Reads a run into a kept stream, whether or not a client is connected. `stream_reply` starts it."""

from __future__ import annotations

import asyncio

from quire.client.engine_client import DeltaStreamClosed
from quire.server.generation import GenerationRun
from quire.server.http.errors import ApiError, from_quire_error
from quire.server.state import Server
from quire.server.streams.kept_streams import KeptStream
from quire.server.streams.stream_encoder import StreamEncoder
from quire.types import QuireError

MAX_STREAM_BYTES = 16 << 20  # of one stream; beyond it the request ends
LOOK_SECONDS = 1.0  # between two looks whether a stream was left


def start_reading(stream: KeptStream, run: GenerationRun, encoder: StreamEncoder, server: Server) -> None:
    """Read the run in a task, which counts as an open reply while the server drains."""
    server.streams.keep_task(asyncio.get_running_loop().create_task(_read(stream, run, encoder, server)))


async def _read(stream: KeptStream, run: GenerationRun, encoder: StreamEncoder, server: Server) -> None:
    """Keep all events of a run. A stream that is not resumed in time, or is too large, is cancelled."""
    server.reply_opened()
    try:
        stream.add(encoder.start())
        while not run.done:
            pieces = await run.next(LOOK_SECONDS)
            if pieces:
                stream.add(encoder.push(pieces))
            if stream.must_end:
                run.close()
            if stream.num_bytes > MAX_STREAM_BYTES:
                raise QuireError("reply_too_large", f"The stream has more than {MAX_STREAM_BYTES} bytes.")
        stream.add(await encoder.finish())
    except DeltaStreamClosed:
        server.metrics.disconnected(run.job.route)
        stream.add(encoder.fail(ApiError(499, "cancelled", "The stream was left, or cancelled.")))
    except QuireError as error:
        server.note_failure(run.job.route, run.job.request_id, error)
        server.metrics.stream_broke(run.job.route, error.code)
        stream.add(encoder.fail(from_quire_error(error, route=run.job.route)))
    except Exception as error:
        server.log.write("error", "bug", id=run.job.request_id, error=f"{type(error).__name__}: {error}")
        stream.add(encoder.fail(ApiError(500, "internal_error", "The server made a mistake.")))
    finally:
        run.close()
        stream.complete()
        server.reply_closed()
