"""Transfer of shards between nodes: plain TCP streams from memory map to memory map, each after a short signed exchange.

    server → client   greeting   {version, nonce}
    client → server   request    {op: get|put, job, key | manifest, lane, lanes, nonce}   signed with the job's token and nonce
    server → client   answer     {ok, reason, manifest | spans, from}                     signed over the client's nonce
    (get) client → server   {spans, from}: the spans wanted on this connection            signed, likewise
    (get) server → client, (put) client → server: the bytes of those spans
    (put) server → client   receipt {ok, reason, durable}    signed, once committed; `durable`: newest of the rank on its disk
    (get) client → server   receipt {ok}                     if not ok, the server verifies its shard

`op` is "link" for a test of the network between two nodes without ranks, with a token of its own instead of a job's (`links`).

A large shard uses several connections in parallel (`lanes`); the receiver chooses the spans of each. Version 1 has one
connection, all spans from number `from` on, and only the disk as destination; it is still supported.

The token is never sent. Signatures cover the manifest, and the manifest covers every byte; the bytes are not encrypted. Every
span is verified on arrival, so a failed connection costs at most one span: the next attempt requests the missing ones. Every
wait has a limit. The resources that peers may occupy before they have shown a token are limited, too (`strangers`)."""
