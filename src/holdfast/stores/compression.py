"""Compression of stored bodies: events and pending entries repeat the same JSON words.

Only the stored bytes change. Hashes are computed over the original body, and every reader gets it back byte for byte.
A short body is stored as it is. A compressed body begins with ``x``, as no JSON does, and zlib's header names the
dictionary that it needs: another dictionary can be added, this one must never change.
"""

from __future__ import annotations

import zlib

MIN_COMPRESSED_BYTES = 400
"""Shorter bodies, such as the events of a plain step, are not worth the time."""

_COMPRESSED_MARK = b"x"

# Words of the log and of JSON Schema, the most frequent last: zlib refers to the nearest bytes with the shortest code.
_DICTIONARY = (
    b'"$ref":"#/$defs/","format":"date-time","pattern":"","minLength":1,"maxLength":1,"minItems":1,"maxItems":1,'
    b'"exclusiveMinimum":0,"minimum":0,"maximum":1,"const":"","default":null,"title":"","description":"","$defs":{'
    b'"anyOf":[{"type":"null"},"enum":["",{"type":"array","items":{"type":"boolean"},{"type":"number"},'
    b'{"type":"integer"},{"type":"string"}'
    b'{"type":"ConversationOpened","metadata":{"{"type":"TurnStarted","limits":{"{"type":"HistorySummarised","upto":'
    b'{"type":"OutputRejected","message":"{"type":"GrantGiven","scope":"tool","args_digest":"","until":'
    b'{"type":"CancelRequested","turn":{"type":"TurnEnded","reason":"completed","halted":true,'
    b'"thinking":"","partial":true,"parts":[{"kind":"","data":{"provider":"","verdicts":[{"name":"","outcome":"",'
    b'"refused":{"kind":"invalid_arguments","message":"","raw":"","grant":"","planned":true,"manual":true,"timeout":'
    b'"recovery":"ask","on_expiry":"deny","result_schema":{"type":"object","mode":"manual","output":{'
    b'{"type":"CallResolved","call_id":"","kind":"approval","decision":{"type":"approve"},"digest":"'
    b'{"type":"CallStarted","call_id":"","attempt":1,"epoch":1}'
    b'"error":{"kind":"timeout","message":"","details":{"reason":""}},"edited":{"artifact":"","size":'
    b'"source":"client","source":"human","source":"system","data":{"'
    b'{"type":"CallReturned","seq":6,"at":17.0,"by":{"id":"system"},"v":1,"call_id":"","tool":"","ok":true,"value":{"'
    b'{"type":"MessageReceived","seq":2,"at":17.0,"by":{"id":"user","roles":[""],"claims":{"},"v":1,"text":"'
    b'"executor":"client","kind":"client_exec","executor":"human","kind":"elicitation","choices":[""],"reason":"manual"'
    b'{"conversation":"","call":"","tool":"","executor":"server","kind":"approval","prompt":"","preview_error":null,'
    b'"digest":"","schema":{"type":"object","properties":{"":{"type":"string"}},"required":[""],'
    b'"additionalProperties":false},"choices":null,"deadline":17.0,"on_expiry":"error","risk":"medium","risk":"low",'
    b'"risk":"high","recovery":false,"principal":{"id":"user"},"since":17.0,"agent":"","reason":null}'
    b'{"type":"AssistantSaid","seq":4,"at":17.0,"by":{"id":"system"},"v":1,"turn":1,"step":1,"id":"m1.1","text":"",'
    b'"calls":[{"id":"","provider_id":"call_","tool":"","args":{"":""},"gate":"required","prompt":"",'
    b'"expires":604800.0,"retention":{"kind":"turns","n":6},"risk":"high","schema":{"type":"object","properties":{"":'
    b'{"type":"string"}},"required":[""],"additionalProperties":false}}],"attempts":[{"model":"","usage":{'
    b'"input_tokens":1,"output_tokens":1,"cache_read_tokens":1,"cache_write_tokens":1,"cost":0.01}}]}'
    b'{"type":"CallSuspended","seq":5,"at":17.0,"by":{"id":"system"},"v":1,"call_id":"","tool":"","executor":"server",'
    b'"kind":"approval","prompt":"","args":{"":""},"preview":{"tool":"","args":{"":""}},"digest":"'
)


def compress_body(body: bytes) -> bytes:
    """Return the bytes to store: compressed, or the body itself if it is short."""
    if len(body) < MIN_COMPRESSED_BYTES and not body.startswith(_COMPRESSED_MARK):
        return body
    compressor = zlib.compressobj(zdict=_DICTIONARY)
    return compressor.compress(body) + compressor.flush()


def decompress_body(stored: bytes) -> bytes:
    """Return the original body. Damaged bytes are returned unchanged: they do not fit the hash chain."""
    if not stored.startswith(_COMPRESSED_MARK):
        return stored
    decompressor = zlib.decompressobj(zdict=_DICTIONARY)
    try:
        body = decompressor.decompress(stored)
    except zlib.error:
        return stored
    return body if decompressor.eof and not decompressor.unused_data else stored
