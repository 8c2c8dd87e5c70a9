"""How bodies lie on the disk: the same JSON words stand in every event and every entry, so they are written shorter.

Only what is stored changes. Hashes are of the body as it was given, and everybody who asks the store gets it back to
the byte. A short body is left as it is; what is packed begins with ``x``, as no JSON does (and says by itself which
dictionary it needs: another one can be added, this one can never change).
"""

from __future__ import annotations

import zlib

PACKED_FROM = 400
"""Bytes. Less than that is not worth the time: the events of a plain step are shorter."""

FIXED_UP_TO = 1024
"""Bytes. For less, a code of its own saves little, and to make it anew is half of the time that unpacking takes."""

_MARK = b"x"

# Words of the log and of JSON Schema, the most frequent last: from there a reference is shortest.
_WORDS = (
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

_NAME = zlib.adler32(_WORDS).to_bytes(4, "big")
"""What zlib calls this dictionary: it stands behind the first two bytes of whatever is packed."""


def packed(body: bytes) -> bytes:
    if len(body) < PACKED_FROM and body[:1] != _MARK:
        return body
    code = zlib.Z_FIXED if len(body) <= FIXED_UP_TO else zlib.Z_DEFAULT_STRATEGY
    packer = zlib.compressobj(zdict=_WORDS, strategy=code)
    return packer.compress(body) + packer.flush()


def unpacked(stored: bytes) -> bytes:
    """What was given. Damaged bytes are given as they are: they are no event, and whoever looks at them says so."""
    if not stored.startswith(_MARK):
        return stored
    # In pieces: zlib itself would go over the whole dictionary each time to see that it is the one that is meant.
    if stored[2:6] != _NAME:
        return stored
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS, _WORDS)
    try:
        body = unpacker.decompress(stored[6:])
    except zlib.error:
        return stored
    return body if unpacker.unused_data == zlib.adler32(body).to_bytes(4, "big") else stored
