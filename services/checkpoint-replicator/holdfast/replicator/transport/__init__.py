"""Shard bytes between nodes: plain TCP streams from memory map to file, one short signed exchange in front of each.

    server → client   greeting   {version, nonce}
    client → server   request    {op: get|put, job, key, from | manifest, nonce}   signed with the job's token and nonce
    server → client   answer     {ok, reason, from | manifest}                     signed over the client's nonce
    (get) server → client, (put) client → server: the spans of the shard from number `from` on, as they are
    (put) server → client   receipt {ok, reason}                                   signed, once committed
    (get) client → server   receipt {ok}                                           a no makes the holder verify its shard

The token itself never travels. Signatures cover the manifest, the manifest covers every byte; the bytes themselves are not
encrypted. Every span is verified where it arrives, so a broken connection costs at most one span: the next try goes on from
the last one that was good. Every wait has a limit.
"""
