"""Bodies in gzip, deflate and zstd, which are bounded by the size that they unpack to."""

from __future__ import annotations

import gzip
import json
import random
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.openai.errors import InvalidRequest
from gateway.edge.bodies import FEED_BYTES, MAX_STREAMS, STEP_BYTES, encoding_of, unpacked
from gateway.errors import RequestRefused
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIB = 1 << 20


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
]
EACH = pytest.mark.parametrize(("encoding", "pack"), PACKED, ids=["gzip", "zlib", "raw", "zstd"])
Pack = Callable[[bytes], bytes]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "größer " * 1000}]}


async def out_of(body: bytes, encoding: str, most: int = 8 * MIB) -> bytes:
    return await unpacked(body, encoding, most, lambda nbytes: None)


@EACH
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_packed_body_is_read_in_every_dialect(encoding: str, pack: Pack, path: str) -> None:
    app = App(RecordingEngine(chat_answer()))
    asked = {"model": MODEL, "input": "hi"} if "responses" in path else {**CHAT, "max_tokens": 5}
    body = pack(json.dumps(asked).encode())
    answer = await app.post(path, body, content_encoding=encoding)
    assert answer.status == 200, answer.body
    assert app.gateway.bodies.nbytes == 0
    plain = await app.post(path, asked)
    assert plain.status == 200
    first, second = (x.body["messages"] for x in app.engine.asked)
    assert first == second


@EACH
async def test_what_comes_out_is_what_went_in(encoding: str, pack: Pack) -> None:
    dice = random.Random(1)
    for nbytes in (0, 1, 1000, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES):
        for body in (dice.randbytes(nbytes), b"x" * nbytes):
            assert await out_of(pack(body), encoding) == body


@EACH
async def test_a_bomb_takes_neither_memory_nor_time(encoding: str, pack: Pack) -> None:
    bomb = pack(bytes(96 * MIB))
    app = App(RecordingEngine(chat_answer()))
    tracemalloc.start()
    try:
        began = time.process_time()
        answer = await app.post("/v1/chat/completions", bomb, content_encoding=encoding)
        took_s = time.process_time() - began
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status == 413 and answer.error["code"] == "body_too_large"
    assert most < 2 * app.gateway.config.max_body_bytes + len(bomb)
    assert took_s < 5.0  # unpacking all of it takes longer on any machine
    assert app.gateway.bodies.nbytes == 0


@EACH
async def test_what_it_unpacks_to_counts_in_the_budget_of_all_bodies(encoding, pack):
    app = App(RecordingEngine(chat_answer()), max_bodies_bytes=2 * MIB)
    answer = await app.post("/v1/chat/completions", pack(bytes(4 * MIB)), content_encoding=encoding)
    assert answer.status == 503 and answer.error["code"] == "bodies_full"
    assert app.gateway.bodies.nbytes == 0


@EACH
async def test_a_damaged_body_is_400(encoding: str, pack: Pack) -> None:
    whole = pack(json.dumps(CHAT).encode())
    app = App(RecordingEngine(chat_answer()))
    damaged = [whole[:-1], whole[: len(whole) // 2], whole + b"x", whole + whole, b"{}", whole[9:]]
    for body in damaged:
        answer = await app.post("/v1/chat/completions", body, content_encoding=encoding)
        assert answer.status == 400, answer.body
    assert app.engine.asked == []


@pytest.mark.parametrize(("encoding", "pack"), [x for x in PACKED if x[0] != "deflate"])
async def test_streams_may_follow_one_another(encoding: str, pack: Pack) -> None:
    """RFC 1952, 2.2, and RFC 8878, 3.1: as several programs write large files."""
    dice = random.Random(2)
    pieces = [dice.randbytes(n) for n in (0, 1, FEED_BYTES, 5, STEP_BYTES + 3, 0)] + [b"x" * MIB]
    packed = b"".join(map(pack, pieces))
    assert await out_of(packed, encoding) == b"".join(pieces)
    with pytest.raises(InvalidRequest, match="is larger than") as error:
        await out_of(packed, encoding, MIB)
    assert error.value.status == 413
    for damaged in (packed + b"x", packed + pack(b"more")[:-1]):
        with pytest.raises(InvalidRequest) as error:
            await out_of(damaged, encoding)
        assert error.value.status == 400


@EACH
async def test_streams_of_nothing_are_bounded_in_number(encoding: str, pack: Pack) -> None:
    most = 1 if encoding == "deflate" else MAX_STREAMS
    assert await out_of(pack(b"") * most, encoding) == b""
    with pytest.raises(InvalidRequest, match="goes on after the end"):
        await out_of(pack(b"") * (most + 1), encoding)


@pytest.mark.parametrize("nbytes", [1, 511, FEED_BYTES, 3 * FEED_BYTES])
async def test_zeros_after_gzip_are_padding(nbytes: int) -> None:
    """So gzip(1) has it; archives are filled up to whole blocks."""
    for body in (b"", b"{}", random.Random(3).randbytes(FEED_BYTES)):
        padded = gzip.compress(body[:9]) + gzip.compress(body[9:]) + bytes(nbytes)
        assert await out_of(padded, "gzip") == body
        for more in (b"x", gzip.compress(b"")):
            with pytest.raises(InvalidRequest) as error:
                await out_of(padded + more, "gzip")
            assert error.value.status == 400
    for encoding, pack in PACKED[1:]:
        with pytest.raises(InvalidRequest):
            await out_of(pack(b"{}") + bytes(nbytes), encoding)


async def test_a_zstd_frame_to_skip_is_skipped() -> None:
    skipped = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    assert await out_of(skipped + zstd.compress(b"{}") + skipped, "zstd") == b"{}"


@EACH
@given(st.binary(max_size=200), st.integers(0, 1000))
async def test_no_bytes_break_it(encoding: str, pack: Pack, garbage: bytes, at: int) -> None:
    whole = pack(b"some text " * 20)
    at %= len(whole)
    for body in (garbage, whole[:at] + garbage + whole[at + 1 :]):
        try:
            assert len(await out_of(body, encoding, 1000)) <= 1000
        except InvalidRequest as error:
            assert error.status in (400, 413)


async def test_a_zstd_frame_may_not_ask_for_much_memory() -> None:
    option = zstd.CompressionParameter.window_log
    packer = zstd.ZstdCompressor(options={option: 27})
    body = packer.compress(b"{}") + packer.flush()
    with pytest.raises(InvalidRequest, match="too much memory"):
        await out_of(body, "zstd")


@pytest.mark.parametrize("said", ["br", "gzip, zstd", "compress", "zstd,zstd", "none"])
async def test_other_encodings_are_415_and_say_which_are_taken(said: str) -> None:
    app = App()
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await app.post(path, b"{}", content_encoding=said)
        assert answer.status == 415
        assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
        assert "gzip, deflate, zstd" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [("", ""), ("identity", ""), ("GZIP", "gzip"), ("x-gzip", "gzip"), ("identity, zstd", "zstd")],
)
def test_names_of_encodings(said: str, meant: str) -> None:
    assert encoding_of(said) == meant
    with pytest.raises(RequestRefused):
        encoding_of(f"{said or 'zstd'}, br")
