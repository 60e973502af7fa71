"""Shard bytes between nodes: plain TCP streams from memory map to memory map, one short signed exchange in front of each.

    server → client   greeting   {version, nonce}
    client → server   request    {op: get|put, job, key | manifest, lane, lanes, nonce}   signed with the job's token and nonce
    server → client   answer     {ok, reason, manifest | spans, from}                     signed over the client's nonce
    (get) client → server   {spans, from}: what it wants on this connection                signed, likewise
    (get) server → client, (put) client → server: those spans of the shard, as they are
    (put) server → client   receipt {ok, reason, durable}    signed, once committed; `durable`: newest of the rank on its disk
    (get) client → server   receipt {ok}                     a no makes the holder verify its shard

A large shard takes several connections side by side (`lanes`); whoever receives says which spans come on which. Version 1 knows
one connection, every span from number `from` on, and no place but the disk; it is still understood.

The token itself never travels. Signatures cover the manifest, the manifest covers every byte; the bytes themselves are not
encrypted. Every span is verified where it arrives, so a broken connection costs at most one span: the next try asks for what is
missing. Every wait has a limit.
"""
